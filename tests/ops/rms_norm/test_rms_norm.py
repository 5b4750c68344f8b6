"""rms_norm: what the parity harness does not ask."""

import sys
import types

import pytest
import torch

from opslot import KERNEL_REGISTRY
from opslot._base.device import CPU, DeviceFacts
from opslot._base.errors import ConfigError, KernelError
from opslot.ops.rms_norm import op
from opslot.slots import KernelRequest

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-6
KERNELS = [("standard", "triton"), ("offset", "triton"), ("standard", "torch_fused"), ("offset", "torch_fused")]


def tensors(*shapes, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator).to(DEVICE, dtype).requires_grad_() for s in shapes]


def load(variant, name):
    return KERNEL_REGISTRY.load("rms_norm", variant, name)


@pytest.mark.parametrize(
    ("module", "cls", "variant"),
    [
        ("llama", "LlamaRMSNorm", "standard"),
        ("qwen3_moe", "Qwen3MoeRMSNorm", "standard"),
        ("gemma3", "Gemma3RMSNorm", "offset"),
        ("qwen3_5", "Qwen3_5RMSNorm", "offset"),
        ("qwen3_next", "Qwen3NextRMSNormGated", "gated"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_references_are_upstream_bit_for_bit(module, cls, variant, dtype):
    upstream = pytest.importorskip(f"transformers.models.{module}.modeling_{module}")
    norm = getattr(upstream, cls)(32, eps=EPS).to(dtype)
    x, gate, weight = (torch.randn(s, dtype=dtype) for s in ((3, 5, 32), (3, 5, 32), (32,)))
    norm.weight.data.copy_(weight)
    extra = {"gate": gate} if variant == "gated" else {}
    expected = norm(x, *extra.values())
    assert torch.equal(getattr(op, variant)(x, weight, EPS, **extra), expected)


@pytest.mark.parametrize(("variant", "name"), KERNELS)
def test_only_the_wanted_gradients_are_made(variant, name):
    kernel = load(variant, name)
    x, weight = tensors((6, 16), (16,))
    dx, dweight = torch.autograd.grad(kernel(x, weight, EPS).square().sum(), (x, weight))
    (only_x,) = torch.autograd.grad(kernel(x, weight.detach(), EPS).square().sum(), x)
    (only_weight,) = torch.autograd.grad(kernel(x.detach(), weight, EPS).square().sum(), weight)
    assert torch.equal(only_x, dx)
    assert torch.equal(only_weight, dweight)


def test_triton_backward_writes_nothing_that_nobody_needs():
    load("standard", "triton")
    x, weight = (t.detach() for t in tensors((6, 16), (16,)))
    dx, dweight, dgate = torch.ops.opslot.rms_norm_backward(x, x, weight, None, EPS, False, False, True, False)
    assert (dx.numel(), dweight.shape, dgate.numel()) == (0, (16,), 0)


@pytest.mark.parametrize(("variant", "name"), KERNELS)
@pytest.mark.parametrize("layout", ["expanded", "transposed", "every second column"])
def test_gradients_of_any_layout(variant, name, layout):
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


@pytest.mark.parametrize("variant", ["standard", "offset", "gated"])
def test_triton_gives_the_same_bits_twice(variant):
    kernel = load(variant, "triton")
    x, weight, gate = tensors((67, 48), (48,), (67, 48), dtype=torch.bfloat16)
    inputs = (x, weight, gate) if variant == "gated" else (x, weight)

    def run():
        out = kernel(x, weight, EPS, *inputs[2:])
        return out, *torch.autograd.grad(out.float().square().sum(), inputs)

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


def test_triton_rows_do_not_depend_on_the_batch():
    kernel = load("standard", "triton")
    x, weight = (t.detach() for t in tensors((130, 32), (32,), dtype=torch.bfloat16))
    whole = kernel(x, weight, EPS)
    assert torch.equal(kernel(x[77:78], weight, EPS), whole[77:78])
    assert torch.equal(kernel(x[:64].flip(0), weight, EPS).flip(0), whole[:64])


def test_an_all_zero_row_stays_finite():
    for variant, name in KERNELS:
        x, weight = torch.zeros(2, 8, device=DEVICE, requires_grad=True), torch.ones(8, device=DEVICE)
        out = load(variant, name)(x, weight, EPS)
        (grad,) = torch.autograd.grad(out.sum(), x)
        assert out.abs().max() == 0
        assert grad.isfinite().all(), (variant, name)


@pytest.mark.parametrize(("variant", "name"), [*KERNELS, ("unweighted", "triton"), ("gated", "triton")])
def test_compiles_as_one_graph(variant, name):
    kernel = load(variant, name)
    x, weight, gate = tensors((4, 16), (16,), (4, 16))
    inputs = {"unweighted": (x,), "gated": (x, weight, gate)}.get(variant, (x, weight))

    def call(*args):
        if variant == "unweighted":
            return kernel(*args, EPS)
        return kernel(*args[:2], EPS, *args[2:])

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    expected = torch.autograd.grad(call(*inputs).square().sum(), inputs)
    found = torch.autograd.grad(compiled(*inputs).square().sum(), inputs)
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want)


def test_opcheck():
    load("standard", "triton")
    x, weight = (t.detach() for t in tensors((3, 8), (8,)))
    torch.library.opcheck(torch.ops.opslot.rms_norm.default, (x, weight, None, EPS, False))
    torch.library.opcheck(torch.ops.opslot.rms_norm_backward.default, (x, x, weight, x, EPS, False, True, False, True))


def test_second_derivatives_are_an_error_not_a_zero():
    for variant, name in KERNELS:
        x, weight = tensors((2, 8), (8,))
        (grad,) = torch.autograd.grad(load(variant, name)(x, weight, EPS).square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.sum().backward()


@pytest.mark.parametrize(
    ("x", "weight", "said"),
    [
        (torch.zeros(2, 8, dtype=torch.float64), torch.zeros(8), "hidden_states: its dtype is torch.float64"),
        (torch.zeros(2, 8), torch.zeros(4), r"weight: its shape is \(4,\), not \(8,\)"),
        (torch.zeros(1, 65537), torch.zeros(65537), "65537 wide, the limit is 65536"),
    ],
)
def test_triton_refuses_what_it_does_not_serve(x, weight, said):
    with pytest.raises(KernelError, match=said) as caught:
        load("standard", "triton")(x, weight, EPS)
    assert "rms_norm_implementation='triton'" in str(caught.value)
    assert "to do: use eager" in str(caught.value)


@pytest.mark.parametrize("name", ["npu", "liger_kernel"])
def test_naming_a_kernel_of_other_hardware_tells_everything(name):
    with pytest.raises(ConfigError) as caught:
        KERNEL_REGISTRY.resolve(KernelRequest("rms_norm", "standard", CPU, torch.float32), name)
    message = str(caught.value)
    assert f"rms_norm_implementation='{name}'" in message
    assert "needs a" in message
    assert "torch_fused" in message.partition("usable here:")[2]


def test_npu_calls_the_vendor_with_its_own_names(monkeypatch):
    def npu_rms_norm(x, gamma, epsilon):
        return op.standard(x, gamma, epsilon), None

    monkeypatch.setitem(sys.modules, "torch_npu", types.SimpleNamespace(npu_rms_norm=npu_rms_norm))
    monkeypatch.delitem(sys.modules, "opslot.ops.rms_norm.npu", raising=False)
    from opslot.ops.rms_norm import npu

    monkeypatch.delitem(sys.modules, "opslot.ops.rms_norm.npu")
    x, weight = torch.randn(3, 8), torch.randn(8)
    assert torch.equal(npu.standard(x, weight, EPS), op.standard(x, weight, EPS))


@pytest.mark.parametrize(
    ("device", "dtype", "expected"),
    [
        (CPU, torch.float32, "torch_fused"),
        (DeviceFacts("gpu", (9, 0)), torch.bfloat16, "triton"),
        (DeviceFacts("gpu", (7, 5)), torch.float16, "eager"),
    ],
)
def test_auto_takes_the_measured_best(device, dtype, expected):
    assert KERNEL_REGISTRY.resolve(KernelRequest("rms_norm", "standard", device, dtype)).chosen == expected


def test_gated_refuses_another_activation_at_the_site():
    check_site = op.OP.variant("gated").check_site
    assert check_site(types.SimpleNamespace(activation="silu")) is None
    assert check_site(types.SimpleNamespace()) is None
    assert "sigmoid" in check_site(types.SimpleNamespace(activation="sigmoid"))
