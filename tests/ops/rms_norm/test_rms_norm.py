"""rms_norm: cases that the parity harness does not cover."""

import importlib
import types

import pytest
import torch

from opslot import KERNEL_REGISTRY
from opslot._base.device import CPU, DeviceFacts
from opslot._base.errors import ConfigError, KernelError
from opslot.ops.rms_norm import op
from opslot.slots import KernelRequest
from tests.ops.rms_norm.inputs import DEVICE, EPS, tensors

KERNELS = [
    (variant, name)
    for name in ("triton", "torch_fused")
    for variant in ("standard", "weight_offset", "cast_after_weight")
]


def load(variant, name):
    return KERNEL_REGISTRY.load("rms_norm", variant, name)


@pytest.mark.parametrize(
    ("module", "cls", "variant"),
    [
        ("llama", "LlamaRMSNorm", "standard"),
        ("qwen3_moe", "Qwen3MoeRMSNorm", "standard"),
        ("gemma3", "Gemma3RMSNorm", "weight_offset"),
        ("qwen3_5", "Qwen3_5RMSNorm", "weight_offset"),
        ("gpt_oss", "GptOssRMSNorm", "cast_after_weight"),
        ("olmo2", "Olmo2RMSNorm", "cast_after_weight"),
        ("helium", "HeliumRMSNorm", "cast_after_weight"),
        ("qwen3_next", "Qwen3NextRMSNormGated", "gated"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_references_equal_transformers_bit_for_bit(module, cls, variant, dtype):
    upstream = pytest.importorskip(f"transformers.models.{module}.modeling_{module}")
    norm = getattr(upstream, cls)(32, eps=EPS).to(dtype)
    x, gate, weight = (torch.randn(s, dtype=dtype) for s in ((3, 5, 32), (3, 5, 32), (32,)))
    norm.weight.data.copy_(weight)
    extra = {"gate": gate} if variant == "gated" else {}
    expected = norm(x, *extra.values())
    assert torch.equal(getattr(op, variant)(x, weight, EPS, **extra), expected)


@pytest.mark.parametrize(("variant", "name"), KERNELS)
def test_one_dimensional_input(variant, name):
    kernel = load(variant, name)
    x, weight, dout = tensors((24,), (24,), (24,))
    expected = torch.autograd.grad(getattr(op, variant)(x, weight, EPS), (x, weight), dout)
    found = torch.autograd.grad(kernel(x, weight, EPS), (x, weight), dout)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("variant", "name"), KERNELS)
@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")
def test_partial_tiles_work_with_zero_eps(variant, name):
    kernel = load(variant, name)
    x, weight, dout = tensors((3, 24), (24,), (3, 24))
    expected = torch.autograd.grad(getattr(op, variant)(x, weight, 0.0), (x, weight), dout)
    found = torch.autograd.grad(kernel(x, weight, 0.0), (x, weight), dout)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("variant", "name"), KERNELS)
def test_equal_values_sum_accurately(variant, name):
    # Each addition rounds in the same direction, so the error of a running sum grows with the hidden size.
    x, weight = torch.rand(5, 1, device=DEVICE).expand(5, 2048), torch.ones(2048, device=DEVICE)
    reference = op.OP.variant(variant).reference
    fp64 = reference(x.double(), weight.double(), EPS)
    error, eager = ((kernel(x, weight, EPS) - fp64).abs().max() for kernel in (load(variant, name), reference))
    assert error <= 2 * eager + torch.finfo(torch.float32).eps * fp64.abs().max()


@pytest.mark.parametrize(("variant", "name"), KERNELS)
def test_autocast_does_not_downcast_the_backward(variant, name):
    kernel = load(variant, name)
    x, weight, dout = tensors((6, 64), (64,), (6, 64))
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        expected = torch.autograd.grad(getattr(op, variant)(x, weight, EPS), (x, weight), dout)
        found = torch.autograd.grad(kernel(x, weight, EPS), (x, weight), dout)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("variant", "name"), KERNELS)
def test_only_required_gradients_are_computed(variant, name):
    kernel = load(variant, name)
    x, weight = tensors((6, 16), (16,))
    dx, dweight = torch.autograd.grad(kernel(x, weight, EPS).square().sum(), (x, weight))
    (only_x,) = torch.autograd.grad(kernel(x, weight.detach(), EPS).square().sum(), x)
    (only_weight,) = torch.autograd.grad(kernel(x.detach(), weight, EPS).square().sum(), weight)
    assert torch.equal(only_x, dx)
    assert torch.equal(only_weight, dweight)


def test_triton_backward_allocates_only_required_gradients():
    load("standard", "triton")
    x, weight = (t.detach() for t in tensors((6, 16), (16,)))
    dx, dweight, dgate = torch.ops.opslot.rms_norm_backward(
        x, x, weight, None, EPS, False, False, 1, False, False, False, True, False
    )
    assert (dx.numel(), dweight.shape, dgate.numel()) == (0, (16,), 0)


@pytest.mark.parametrize(("variant", "name"), KERNELS)
@pytest.mark.parametrize("layout", ["expanded", "transposed", "every second column"])
def test_gradients_with_any_layout(variant, name, layout):
    x, weight = tensors((4, 6, 16), (16,))
    dense = {
        "expanded": torch.ones((), device=DEVICE).expand(4, 6, 16),
        "transposed": torch.randn(6, 4, 16, device=DEVICE).transpose(0, 1),
        "every second column": torch.randn(4, 6, 32, device=DEVICE)[..., ::2],
    }[layout]
    kernel = load(variant, name)
    found = torch.autograd.grad(kernel(x, weight, EPS), (x, weight), dense)
    expected = torch.autograd.grad(getattr(op, variant)(x, weight, EPS), (x, weight), dense)
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("variant", ["standard", "weight_offset", "cast_after_weight", "gated"])
def test_triton_is_deterministic(variant):
    kernel = load(variant, "triton")
    x, weight, gate = tensors((67, 48), (48,), (67, 48), dtype=torch.bfloat16)
    inputs = (x, weight, gate) if variant == "gated" else (x, weight)

    def run():
        out = kernel(x, weight, EPS, *inputs[2:])
        return out, *torch.autograd.grad(out.float().square().sum(), inputs)

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


RESIDUAL = ["fused_add", "fused_add_cast_after_weight", "fused_add_weight_offset"]
INVARIANT = [(variant, "batch_invariant") for variant in ("standard", "weight_offset", "cast_after_weight")]


def outputs_of(kernel, x, weight, dout):
    """Output and gradient of rows `x`, all in one storage."""
    x = x.detach().requires_grad_()
    out = kernel(x, weight, EPS)
    return out.detach(), *torch.autograd.grad(out, (x, weight), dout)


@pytest.mark.parametrize(("variant", "name"), INVARIANT)
@pytest.mark.parametrize("width", [64, 123])
def test_batch_invariant_rows_do_not_depend_on_the_batch(variant, name, width):
    kernel = load(variant, name)
    x, dout, weight = tensors((130, width), (130, width), (width,), dtype=torch.bfloat16)
    x, dout = x.detach(), dout.detach()
    out, dx, _ = outputs_of(kernel, x, weight, dout)
    order = torch.randperm(130, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    padded = torch.zeros(5, 3 * width + 1, dtype=torch.bfloat16, device=DEVICE)
    for rows, memory in (
        (slice(77, 78), "a row alone"),
        (slice(1, 130), "begins in the middle of memory"),
        (order, "another place"),
        (slice(20, 25), "columns of wider rows at an odd address"),
    ):
        some, arriving = x[rows], dout[rows]
        if memory.startswith("columns"):
            some = padded[:, width + 1 : 2 * width + 1].copy_(some)
        got_out, got_dx, _ = outputs_of(kernel, some, weight, arriving)
        assert torch.equal(got_out, out[rows]), memory
        assert torch.equal(got_dx, dx[rows]), memory


@pytest.mark.parametrize(("variant", "name"), INVARIANT)
def test_batch_invariant_weight_gradient_is_deterministic(variant, name):
    kernel = load(variant, name)
    x, dout, weight = tensors((130, 48), (130, 48), (48,), dtype=torch.bfloat16)
    first, second = (outputs_of(kernel, x, weight, dout.detach())[2] for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("name", ["triton", "torch_fused"])
@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")
def test_cast_after_the_weight_rounds_once(name):
    """Rows of 3, 1, 1 and 5 have the norm 3; whether rounding is before or after the weight shows in fp16."""
    x = torch.tensor([3.0, 1.0, 1.0, 5.0], dtype=torch.float16, device=DEVICE).repeat(2, 32)
    # Multiples of 1/1024 that are not multiples of 3: a third of them is never halfway between two fp16 values.
    weight = ((1025 + 3 * torch.arange(128, device=DEVICE)) / 1024).to(torch.float16)
    found = load("cast_after_weight", name)(x, weight, 0.0)
    assert torch.equal(found, (x.float() / 3 * weight.float()).to(torch.float16))
    assert not torch.equal(found, load("standard", name)(x, weight, 0.0))


@pytest.mark.parametrize("name", ["triton", "torch_fused"])
def test_cast_after_fp32_weights_returns_the_input_dtype(name):
    """DeepSeek-V4 keeps its norms' weights in fp32."""
    x, weight = tensors((6, 48), dtype=torch.bfloat16)[0], tensors((48,), seed=1)[0]
    for function in (load("cast_after_weight", name), op.cast_after_weight):
        out = function(x, weight, EPS)
        grads = torch.autograd.grad(out.float().square().sum(), (x, weight))
        assert [t.dtype for t in (out, *grads)] == [torch.bfloat16, torch.bfloat16, torch.float32]


@pytest.mark.parametrize("variant", RESIDUAL)
def test_fused_add_equals_sum_and_norm(variant):
    """The forward, and the gradients where only the norm is used, bit for bit."""
    x, residual, weight = tensors((5, 40), (5, 40), (40,), dtype=torch.float16)
    normalized, total = load(variant, "triton")(x, residual, weight, EPS)
    assert torch.equal(total, residual + x)
    norm = load(op.OP.variant(variant).extends, "triton")
    expected = norm(residual + x, weight, EPS)
    assert torch.equal(normalized, expected)
    found = torch.autograd.grad(normalized.float().square().sum(), (x, weight))
    wanted = torch.autograd.grad(expected.float().square().sum(), (x, weight))
    assert all(torch.equal(f, w) for f, w in zip(found, wanted, strict=True))


def test_fused_add_rounds_the_sum_before_the_norm():
    """Transformers' sum has the model's dtype: 256 + 1 is 256 in bf16, and the norm gets 256."""
    x, residual = (torch.full((1, 32), v, dtype=torch.bfloat16, device=DEVICE) for v in (1.0, 256.0))
    residual[0, 0] = 0.0
    weight = torch.ones(32, dtype=torch.bfloat16, device=DEVICE)
    normalized, total = load("fused_add", "triton")(x, residual, weight, EPS)
    assert torch.equal(total, residual + x)
    assert total[0, 1].item() == 256.0
    assert torch.equal(normalized, load("standard", "triton")(residual + x, weight, EPS))


@pytest.mark.parametrize("variant", RESIDUAL)
def test_fused_add_gradients_of_each_output(variant):
    """Only the norm, only the sum, or both are used; frozen terms get none; both terms have the same gradient."""
    kernel = load(variant, "triton")
    x, residual, weight, dnorm, dsum = tensors((6, 48), (6, 48), (48,), (6, 48), (6, 48), dtype=torch.bfloat16)
    dnorm, dsum = dnorm.detach(), dsum.detach()
    inputs = (x, residual, weight)

    def gradients(function, outputs, frozen=()):
        call = [t.detach() if i in frozen else t for i, t in enumerate(inputs)]
        used = [(o, d) for o, d in zip(function(*call, EPS), (dnorm, dsum), strict=True)]
        wanted = [t for i, t in enumerate(inputs) if i not in frozen]
        chosen = [used[i] for i in outputs]
        return torch.autograd.grad([o for o, _ in chosen], wanted, [d for _, d in chosen], allow_unused=True)

    both = gradients(kernel, (0, 1))
    assert torch.equal(both[0], both[1])
    dx, dresidual, dweight = gradients(kernel, (0,))
    assert torch.equal(dx, dresidual)
    assert torch.equal(dweight, both[2])
    torch.testing.assert_close(both[0].float(), dx.float() + dsum.float(), rtol=2**-7, atol=2**-7)
    only_sum = gradients(kernel, (1,))
    assert torch.equal(only_sum[0], dsum)
    assert torch.equal(only_sum[1], dsum)
    assert only_sum[2] is None
    assert torch.equal(gradients(kernel, (0, 1), frozen=(0,))[0], both[1])
    assert torch.equal(gradients(kernel, (0, 1), frozen=(0, 1))[0], both[2])


@pytest.mark.parametrize("variant", RESIDUAL)
def test_fused_add_gradients_keep_the_dtype_of_each_term(variant):
    """Autocast gives bf16 projections and an fp32 residual stream."""
    kernel = load(variant, "triton")
    x, (residual, weight) = tensors((6, 48), dtype=torch.bfloat16)[0], tensors((6, 48), (48,), seed=1)
    for function in (kernel, getattr(op, variant)):
        normalized, total = function(x, residual, weight, EPS)
        assert (normalized.dtype, total.dtype) == (torch.float32, torch.float32)
        grads = torch.autograd.grad(normalized.sum() + total.square().sum(), (x, residual, weight))
        assert [g.dtype for g in grads] == [torch.bfloat16, torch.float32, torch.float32]
        if function is kernel:
            found = grads
    torch.testing.assert_close(found[1], grads[1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[0], grads[0], rtol=2**-7, atol=2**-7)


def test_zero_row_is_finite():
    for variant, name in KERNELS:
        x, weight = torch.zeros(2, 8, device=DEVICE, requires_grad=True), torch.ones(8, device=DEVICE)
        out = load(variant, name)(x, weight, EPS)
        (grad,) = torch.autograd.grad(out.sum(), x)
        assert out.abs().max() == 0
        assert grad.isfinite().all(), (variant, name)


@pytest.mark.quick("standard-*", "fused_add-triton", "gated-triton")
@pytest.mark.parametrize(
    ("variant", "name"), [*KERNELS, *((variant, "triton") for variant in ("unweighted", "gated", *RESIDUAL))]
)
def test_compiles_with_fullgraph(variant, name):
    kernel = load(variant, name)
    x, weight, gate = tensors((4, 16), (16,), (4, 16))
    several = {"unweighted": (x,), "gated": (x, weight, gate)} | dict.fromkeys(RESIDUAL, (x, gate, weight))
    inputs = several.get(variant, (x, weight))

    def call(*args):
        if variant == "unweighted":
            return kernel(*args, EPS)
        if variant in RESIDUAL:
            return torch.cat(kernel(*args, EPS))
        return kernel(*args[:2], EPS, *args[2:])

    # The cases share `call`, and torch.compile has a recompile limit per function.
    torch.compiler.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    expected = torch.autograd.grad(call(*inputs).square().sum(), inputs)
    found = torch.autograd.grad(compiled(*inputs).square().sum(), inputs)
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want)


def test_compiled_torch_fused_takes_gradients_that_are_not_contiguous():
    kernel = KERNEL_REGISTRY.load("rms_norm", "standard", "torch_fused")
    x, weight = torch.randn(2, 3, 4, 8, requires_grad=True), torch.randn(8, requires_grad=True)

    def call(x, weight):
        return kernel(x.transpose(1, 2), weight, 1e-6).transpose(1, 2).contiguous().square().sum()

    torch.compiler.reset()
    found = torch.autograd.grad(torch.compile(call, fullgraph=True, backend="aot_eager")(x, weight), (x, weight))
    torch.testing.assert_close(found, torch.autograd.grad(call(x, weight), (x, weight)))


@pytest.mark.parametrize("dtypes", [("float32", "bfloat16"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")])
def test_norm_of_t5_has_the_dtype_of_transformers(dtypes):
    from transformers.models.t5.modeling_t5 import T5LayerNorm

    of_input, of_weight = (getattr(torch, name) for name in dtypes)
    original = T5LayerNorm(32).to(of_weight)
    torch.nn.init.normal_(original.weight)
    norm = importlib.import_module("opslot.generated.t5").T5LayerNorm(32).to(of_weight)
    norm.load_state_dict(original.state_dict())
    norm._opslot_rms_norm = KERNEL_REGISTRY.load("rms_norm", "standard", "torch_fused")
    x = torch.randn(4, 32, dtype=of_input)
    torch.testing.assert_close(norm(x), original(x))


def test_opcheck():
    load("standard", "triton")
    x, weight = (t.detach() for t in tensors((3, 8), (8,)))
    torch.library.opcheck(torch.ops.opslot.rms_norm.default, (x, weight, None, EPS, False, False, 1, False, False))
    torch.library.opcheck(
        torch.ops.opslot.rms_norm_backward.default,
        (x, x, weight, x, EPS, False, False, 2, True, True, True, False, True),
    )
    torch.library.opcheck(torch.ops.opslot.fused_add_rms_norm.default, (x, x, weight, EPS, True, True))
    backward = torch.ops.opslot.fused_add_rms_norm_backward.default
    torch.library.opcheck(backward, (x, x, x, weight, EPS, True, True, True))
    torch.library.opcheck(backward, (x, None, x, weight, EPS, False, True, False))


def test_second_derivative_raises():
    for variant, name in KERNELS:
        x, weight = tensors((2, 8), (8,))
        with pytest.raises(KernelError, match="no second derivative"):
            torch.autograd.grad(load(variant, name)(x, weight, EPS).square().sum(), x, create_graph=True)


@pytest.mark.parametrize(
    ("x", "weight", "expected_message"),
    [
        (torch.zeros(2, 8, dtype=torch.float64), torch.zeros(8), "hidden_states: its dtype is torch.float64"),
        (torch.zeros(2, 8), torch.zeros(4), r"weight: its shape is \(4,\), not \(8,\)"),
        (torch.zeros(1, 65537), torch.zeros(65537), "65537 elements, the limit is 65536"),
    ],
)
def test_triton_unsupported_inputs_raise(x, weight, expected_message):
    with pytest.raises(KernelError, match=expected_message) as caught:
        load("standard", "triton")(x, weight, EPS)
    assert "rms_norm_implementation='triton'" in str(caught.value)
    assert "hint: use eager" in str(caught.value)


def test_exported_torch_fused_has_gradients():
    class Norm(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.linspace(0.5, 1.5, 8))

        def forward(self, x):
            return load("standard", "torch_fused")(x, self.weight, EPS)

    module, x = Norm(), torch.randn(3, 8, requires_grad=True)
    exported = torch.export.export(module, (x,), strict=False).module()
    gradients = [torch.autograd.grad(norm(x).square().sum(), norm.weight)[0] for norm in (exported, module)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("dtypes", [(torch.float64, torch.float32), (torch.float32, torch.float64)])
def test_torch_fused_with_float64_beside_float32(dtypes):
    for variant in ("standard", "weight_offset", "cast_after_weight"):
        x, weight = (torch.randn(shape, dtype=d, requires_grad=True) for shape, d in zip(((3, 8), (8,)), dtypes))
        found, wanted = (
            torch.autograd.grad(function(x, weight, EPS).square().sum(), (x, weight))
            for function in (load(variant, "torch_fused"), getattr(op, variant))
        )
        # The statistics of float32 rows are float32.
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_torch_fused_without_channels():
    # Gemma 3n with hidden_size_per_layer_input = 0.
    for variant in ("standard", "weight_offset", "cast_after_weight"):
        x, weight = (torch.zeros(shape, requires_grad=True) for shape in ((3, 2, 0), (0,)))
        out = load(variant, "torch_fused")(x, weight, EPS)
        assert [g.shape for g in torch.autograd.grad(out.sum(), (x, weight))] == [x.shape, weight.shape]


@pytest.mark.parametrize("shape", [(1,), (4,), (2, 8)])
def test_torch_fused_broadcast_weights_raise(shape):
    for variant in ("standard", "weight_offset", "cast_after_weight"):
        with pytest.raises(KernelError, match=r"weight: its shape is .*, not \(8,\)"):
            load(variant, "torch_fused")(torch.zeros(2, 8), torch.zeros(shape), EPS)


@pytest.mark.parametrize("name", ["npu", "liger_kernel"])
def test_kernel_for_other_hardware_raises_with_alternatives(name):
    with pytest.raises(ConfigError) as caught:
        KERNEL_REGISTRY.resolve(KernelRequest("rms_norm", "standard", CPU, torch.float32), name)
    message = str(caught.value)
    assert f"rms_norm_implementation='{name}'" in message
    assert "requires a" in message
    assert "torch_fused" in message.partition("usable here:")[2]


@pytest.mark.parametrize(
    ("device", "dtype", "expected"),
    [
        (CPU, torch.float32, "torch_fused"),
        (DeviceFacts("gpu", (9, 0)), torch.bfloat16, "triton_or_torch"),
        (DeviceFacts("gpu", (7, 5)), torch.float16, "eager"),
    ],
)
def test_auto_selects_the_fastest_measured_kernel(device, dtype, expected):
    assert KERNEL_REGISTRY.resolve(KernelRequest("rms_norm", "standard", device, dtype)).chosen == expected


def test_gated_with_another_activation_is_unsupported():
    check_module = op.OP.variant("gated").check_module
    assert check_module(types.SimpleNamespace(activation="silu")) is None
    assert check_module(types.SimpleNamespace()) is None
    assert "sigmoid" in check_module(types.SimpleNamespace(activation="sigmoid"))
