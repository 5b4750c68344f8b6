"""moe_experts: cases that the parity harness does not cover."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from opslot import KERNEL_REGISTRY
from opslot._base.device import facts_of
from opslot._base.errors import KernelError
from opslot.ops._common.activations import limit_has_gradient
from opslot.ops.moe_experts import op
from opslot.slots import KernelRequest
from tests.ops.moe_experts.inputs import DEVICE, KERNELS, inputs, load

VARIANTS = ["standard", "clamped", "biased", "split", "transposed", "ungated"]
NAMES = ("hidden_states", "gate_up_proj", "down_proj", "top_k_index", "top_k_weights")


def differentiable(tensors):
    return [t for t in tensors if isinstance(t, torch.Tensor) and t.requires_grad]


def gradients(kernel, tensors, grad=None):
    out = kernel(*tensors)
    return out, torch.autograd.grad(out, differentiable(tensors), torch.ones_like(out) if grad is None else grad)


def same_as_upstream(module, variant, tensors, dtype):
    """`module`, a Transformers class with its parameters from `tensors`, and op's reference give the same bits."""
    reference = KERNEL_REGISTRY.op("moe_experts").variant(variant).reference
    expected, expected_grads = gradients(lambda x, *_: module(x, tensors[3], tensors[4]), tensors)
    out, grads = gradients(reference, tensors)
    assert torch.equal(out, expected)
    for got, wanted in zip(grads, expected_grads, strict=True):
        assert torch.equal(got, wanted)


def upstream(path, class_name, tensors, **config):
    """Transformers' experts with the parameters `tensors`; skip if this release has no such class."""
    arch = pytest.importorskip(f"transformers.models.{path}")
    module = getattr(arch, class_name)(type("Config", (), {"_experts_implementation": "eager", **config})())
    module = module.to(DEVICE)
    names = ["gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"]
    for name, tensor in zip(names, [*tensors[1:3], *tensors[5:7]], strict=False):
        if name in module._parameters:
            del module._parameters[name]
            setattr(module, name, tensor)
    return module


SIZES = {"hidden_size": 32, "intermediate_size": 16, "moe_intermediate_size": 16, "hidden_act": "silu"}
COUNTS = {"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("variant", "path", "class_name", "gating"),
    [
        ("standard", "qwen3_moe.modeling_qwen3_moe", "Qwen3MoeExperts", ()),
        ("clamped", "deepseek_v4.modeling_deepseek_v4", "DeepseekV4Experts", ()),
        ("clamped", "minimax_m3_vl.modeling_minimax_m3_vl", "MiniMaxM3VLExperts", (1.702, 1.0)),
        ("biased", "gpt_oss.modeling_gpt_oss", "GptOssExperts", ()),
    ],
)
def test_reference_equals_transformers_loop_bit_for_bit(dtype, variant, path, class_name, gating):
    tensors = [*inputs(dtype=dtype, tokens=40, variant=variant), *gating]
    limit = {"standard": 0.0, "clamped": 0.75, "biased": 1.05}[variant]
    experts = upstream(path, class_name, tensors, swiglu_limit=limit, swiglu_alpha=1.702, **SIZES, **COUNTS)
    same_as_upstream(experts, variant, tensors, dtype)
    check = KERNEL_REGISTRY.op("moe_experts").variant(variant).check_module
    assert check(experts) is None


@pytest.mark.quick("*-grouped_mm", "standard-fused_triton")
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_results_are_deterministic(name, variant):
    tensors = inputs(tokens=70, variant=variant)
    first, second = (gradients(load(name, variant), tensors) for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert all(torch.equal(a, b) for a, b in zip(first[1], second[1], strict=True))


class _Zeros(TorchDispatchMode):
    """Records the largest tensor of zeros that is allocated."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if "zeros" in func.__name__:
            self.largest = max(self.largest, out.numel())
        return out


@pytest.mark.parametrize("name", KERNELS)
def test_saved_tensors_get_no_gradient(name):
    """A gradient of zeros for it would cost as much as a pass over the activations."""
    x, gate_up, down, index, weights = inputs(tokens=40)
    out = load(name)(x, gate_up, down, index, weights)
    with _Zeros() as zeros:
        torch.autograd.grad(out.sum(), [x, gate_up, down, weights])
    assert zeros.largest <= weights.numel()


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("name", [*KERNELS, "fused_quack"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_results_are_deterministic_on_a_gpu(name, variant):
    request = KernelRequest("moe_experts", variant, facts_of("cuda"), torch.bfloat16)
    specs = {s.name: s for s in KERNEL_REGISTRY.specs("moe_experts", variant)}
    if name not in specs or specs[name].unsupported(request):
        pytest.skip(f"{name} does not serve {variant} here")
    tensors = inputs(4096, 16, 4, 512, 256, torch.bfloat16, variant=variant)
    first = gradients(load(name, variant), tensors)
    for _ in range(5):
        out, grads = gradients(load(name, variant), tensors)
        assert torch.equal(out, first[0])
        assert all(torch.equal(a, b) for a, b in zip(grads, first[1], strict=True))


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("variant", ["clamped", "biased"])
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_clamped_values_have_no_gradient(name, variant):
    tensors = inputs(variant=variant)
    with torch.no_grad():
        tensors[1].mul_(1e3)
    reference = KERNEL_REGISTRY.op("moe_experts").variant(variant).reference
    _, expected = gradients(reference, tensors)
    _, got = gradients(load(name, variant), tensors)
    # Nearly every gate and up is clamped, so their gradients are mostly exact zeros, the same ones in both.
    assert (expected[1] == 0).float().mean() > 0.5
    assert torch.equal(got[1] == 0, expected[1] == 0)


@pytest.mark.parametrize("name", KERNELS)
def test_values_at_the_limit_have_the_gradient_of_torch_clamp(name):
    """Releases of torch differ in it; in 16 bits, such values are common."""
    hidden = torch.eye(16, device=DEVICE).requires_grad_()
    # Gate i of token j is entry (i, j): below the limit 0.75, at it, or above, and the same for up.
    values = torch.tensor([0.5, 0.75, 1.0, -0.75], device=DEVICE).repeat(4)
    gate_up = torch.diag(values).repeat(2, 1)[None].clone().requires_grad_()
    down = torch.eye(16, device=DEVICE)[None].clone().requires_grad_()
    index = torch.zeros(16, 1, dtype=torch.int64, device=DEVICE)
    tensors = [hidden, gate_up, down, index, torch.ones(16, 1, device=DEVICE, requires_grad=True), 0.75]
    _, expected = gradients(KERNEL_REGISTRY.op("moe_experts").variant("clamped").reference, tensors)
    _, found = gradients(load(name, "clamped"), tensors)
    torch.testing.assert_close(found[1], expected[1])


@pytest.mark.parametrize("name", KERNELS)
def test_clamps_propagate_nan(name):
    tensors = inputs(variant="clamped")
    with torch.no_grad():
        tensors[0][3] = float("nan")
    out = load(name, "clamped")(*tensors)
    assert out[3].isnan().all()
    assert not out[[0, 1, 2, 4]].isnan().any()


@pytest.mark.parametrize("variant", ["clamped", "biased", "split"])
@pytest.mark.parametrize("name", ["fused_quack", "fused_npu"])
def test_standard_kernels_are_not_registered_for_other_variants(name, variant):
    assert name in {s.name for s in KERNEL_REGISTRY.specs("moe_experts", "standard")}
    assert name not in {s.name for s in KERNEL_REGISTRY.specs("moe_experts", variant)}


@pytest.mark.quick("*-grouped_mm", "frozen0-*")
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("frozen", [(5, 6), (1, 2), (0, 1, 2, 4)])
def test_frozen_parameters_do_not_change_other_gradients(name, frozen):
    tensors = inputs(variant="biased")
    _, every = gradients(load(name, "biased"), tensors)
    kept = [grad for i, grad in zip((0, 1, 2, 4, 5, 6), every, strict=True) if i not in frozen]
    for i in frozen:
        tensors[i] = tensors[i].detach()
    _, some = gradients(load(name, "biased"), tensors)
    assert all(torch.equal(a, b) for a, b in zip(kept, some, strict=True))


@pytest.mark.quick("*-grouped_mm", "frozen0-*", "frozen3-*")
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("frozen", [(0,), (1, 2), (4,), (0, 1, 2), (1, 2, 4)])
def test_frozen_inputs_do_not_change_other_gradients(name, frozen):
    tensors = inputs()
    _, every = gradients(load(name), tensors)
    for i in frozen:
        tensors[i] = tensors[i].detach()
    _, some = gradients(load(name), tensors)
    kept = [grad for i, grad in zip((0, 1, 2, 4), every, strict=True) if i not in frozen]
    assert all(torch.equal(a, b) for a, b in zip(kept, some, strict=True))


@pytest.mark.parametrize("name", KERNELS)
def test_expanded_incoming_gradient(name):
    tensors = inputs()
    spread = torch.randn(1, 32, device=DEVICE).expand(11, 32)
    _, got = gradients(load(name), tensors, spread)
    _, wanted = gradients(load(name), tensors, spread.contiguous())
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("name", KERNELS)
def test_routing_weights_with_any_layout(name):
    tensors = inputs()
    expected, expected_grads = gradients(load(name), tensors)
    tensors[4] = tensors[4].detach().t().contiguous().t().requires_grad_()
    out, grads = gradients(load(name), tensors)
    assert torch.equal(out, expected)
    assert all(torch.equal(g, e) for g, e in zip(grads, expected_grads, strict=True))


@pytest.mark.quick("*-grouped_mm", "standard-*", "biased-*")
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_negative_index_selects_no_expert(name, variant):
    tensors = inputs(variant=variant)
    next(t for t in tensors if t.dtype == torch.int64)[::3, 0] = -1
    reference = KERNEL_REGISTRY.op("moe_experts").variant(variant).reference
    expected, expected_grads = gradients(reference, tensors)
    out, grads = gradients(load(name, variant), tensors)
    torch.testing.assert_close((out, *grads), (expected, *expected_grads), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("place", [0, 1, 2, 4])
@pytest.mark.parametrize("name", KERNELS)
def test_unsupported_forward_mode_ad_raises(name, place):
    tensors = [t.detach() for t in inputs()]

    def call(x):
        return load(name)(*tensors[:place], x, *tensors[place + 1 :])

    with pytest.raises(KernelError, match="has no forward-mode derivative"):
        torch.func.jvp(call, (tensors[place],), (torch.ones_like(tensors[place]),))
    with forward_ad.dual_level():
        assert torch.equal(call(tensors[place]), load(name)(*tensors))
        with pytest.raises(KernelError, match="has no forward-mode derivative"):
            call(forward_ad.make_dual(tensors[place], torch.ones_like(tensors[place])))


def in_dual_level(function, x):
    with forward_ad.dual_level():
        return function(forward_ad.make_dual(x, x))


def in_backward(function, x):
    x = x.clone().requires_grad_()
    y = x.clone()
    y.register_hook(function)
    torch.autograd.grad(y.sum(), x)


@pytest.mark.parametrize(
    "run",
    [
        in_dual_level,
        in_backward,
        lambda function, x: torch.func.jvp(function, (x,), (x,)),
        lambda function, x: torch.vmap(function)(x),
        lambda function, x: torch.func.grad(lambda y: function(y).sum())(x),
        torch.no_grad()(lambda function, x: function(x)),
        torch.inference_mode()(lambda function, x: function(x)),
    ],
    ids=["dual level", "backward", "jvp", "vmap", "grad", "no_grad", "inference_mode"],
)
def test_gradient_at_the_limit_is_known_wherever_kernels_are_first_loaded(run):
    x = torch.ones(3, requires_grad=True)
    passes = torch.autograd.grad(x.clamp(max=1.0).sum(), x)[0].bool().all()
    found = []

    def call(y):
        found.append(limit_has_gradient.__wrapped__())
        return y * 1.0

    run(call, torch.ones(3))
    assert found == [bool(passes)]


@pytest.mark.parametrize("name", KERNELS)
def test_undefined_incoming_gradient_gives_none(name):
    class Dropped(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return None

    tensors = inputs()
    Dropped.apply(load(name)(*tensors)).sum().backward()
    assert all(t.grad is None for t in differentiable(tensors))


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_extreme_gates_are_finite(name):
    tensors = inputs()
    with torch.no_grad():
        tensors[1].mul_(1e4)
    out, grads = gradients(load(name), tensors)
    expected, expected_grads = gradients(op.standard, tensors)
    for got, wanted in zip((out, *grads), (expected, *expected_grads), strict=True):
        assert torch.isfinite(got).all()
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5 * wanted.abs().max().item())


@pytest.mark.quick("standard-*", "split-fused_triton")
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_compiles_with_fullgraph(name, variant):
    torch._dynamo.reset()
    tensors = inputs(variant=variant)
    compiled = torch.compile(load(name, variant), fullgraph=True, backend="aot_eager")
    out, grads = gradients(compiled, tensors)
    expected, expected_grads = gradients(load(name, variant), tensors)
    assert torch.equal(out, expected)
    assert all(torch.equal(a, b) for a, b in zip(grads, expected_grads, strict=True))


@pytest.mark.parametrize("variant", ["standard", "clamped"])
def test_two_layers_compile_with_dynamic_shapes(variant):
    """Floats that are defaults became inputs of two graphs."""
    kernel = load("grouped_mm", variant)

    def layers(x, *rest):
        return kernel(kernel(x, *rest), *rest)

    torch.compiler.reset()
    tensors = inputs(variant=variant)
    out, grads = gradients(torch.compile(layers, fullgraph=True, dynamic=True, backend="aot_eager"), tensors)
    expected, expected_grads = gradients(layers, tensors)
    assert torch.equal(out, expected)
    assert all(torch.equal(a, b) for a, b in zip(grads, expected_grads, strict=True))


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("biased", [False, True])
def test_opcheck(name, biased):
    load(name)
    tensors = inputs(tokens=5, variant="biased" if biased else "standard")
    x, gate_up, down, index, weights, *rest = tensors
    biases, gating = (rest[:2], (*rest[2:], 1.0)) if biased else ((None, None), (None, 1.0, 0.0))
    given = (x, gate_up, down, weights, None, *biases, index, *gating, "silu", False, True, biased, biased)
    operator = getattr(torch.ops.opslot, f"moe_{name}").default
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(operator, given, test_utils=checks)


@pytest.mark.parametrize("name", KERNELS)
def test_autocast_computes_in_the_autocast_dtype(name):
    tensors = inputs()
    with torch.autocast(DEVICE, torch.bfloat16):
        out, grads = gradients(load(name), tensors)
        expected, _ = gradients(op.standard, tensors)
    assert out.dtype == expected.dtype == torch.float32
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
    assert {g.dtype for g in grads} == {torch.float32}


def changed(**other):
    tensors = dict(zip(NAMES, inputs(), strict=True))
    return {n: other[n](t) if n in other else t for n, t in tensors.items()}


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (
            changed(hidden_states=lambda t: t[None]),
            "hidden_states [1, 11, 32], down_proj [4, 32, 16], top_k_index [11, 2]",
        ),
        (changed(gate_up_proj=lambda t: t[:, :-2]), "gate_up_proj [4, 30, 32], down_proj [4, 32, 16]"),
        (changed(hidden_states=lambda t: t[:-1]), "hidden_states [10, 32], down_proj [4, 32, 16], top_k_index [11, 2]"),
        (
            changed(top_k_weights=lambda t: t[:, :1]),
            "top_k_weights [11, 1], down_proj [4, 32, 16], top_k_index [11, 2]",
        ),
        (
            changed(hidden_states=lambda t: t.bfloat16()),
            "hidden_states in torch.bfloat16, gate_up_proj in torch.float32",
        ),
        (changed(top_k_index=lambda t: t.float()), "top_k_index in torch.float32"),
        (changed(top_k_weights=lambda t: t.to("meta")), "tensors on"),
        (
            changed(top_k_index=lambda t: t[:, :0], top_k_weights=lambda t: t[:, :0]),
            "4 experts and 0 choices a token",
        ),
        (changed(gate_up_proj=lambda t: t[:0], down_proj=lambda t: t[:0]), "0 experts and 2 choices a token"),
    ],
)
def test_invalid_arguments_raise(name, arguments, found):
    with pytest.raises(KernelError, match="hint:") as caught:
        load(name)(**arguments)
    assert f"moe_implementation='{name}'" in str(caught.value)
    assert found in str(caught.value)


def test_triton_strided_weights_and_float64_raise():
    strided = changed(down_proj=lambda t: t.transpose(1, 2).contiguous().transpose(1, 2))
    with pytest.raises(KernelError, match=r"down_proj with strides \(512, 1, 32\)"):
        load("fused_triton")(**strided)
    wide = changed(**{n: (lambda t: t.double()) for n in NAMES if n != "top_k_index"})
    with pytest.raises(
        KernelError, match=r"hidden_states in torch.float64; this kernel takes bfloat16, float16, float32"
    ):
        load("fused_triton")(**wide)


@pytest.mark.quick("standard", "split", "transposed")
@pytest.mark.parametrize("variant", VARIANTS)
def test_triton_with_tensor_descriptors(variant):
    """The kernels for Hopper; on a CPU through the interpreter."""
    from opslot.ops.moe_experts import contract
    from opslot.ops.moe_experts import triton as fused
    from opslot.ops.moe_experts._autograd import Wanted
    from opslot.ops.moe_experts.routing import Routing
    from opslot.ops.moe_experts.tiling import GemmTiling, Tiles

    if DEVICE == "cuda" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs compute capability 9.0")
    tiles = Tiles(32, 32, 32, 4, 2, group=2)
    plan = GemmTiling(32, tiles, tiles, tiles, tiles, tiles, tiles, tma=True, programs=3)
    tensors = inputs(tokens=45, experts=3, hidden=72, intermediate=40, variant=variant)
    x, experts, index, weights = getattr(contract, variant)(*tensors)
    with torch.no_grad():
        out, projected, *routing = fused.forward(plan, x, experts, index, weights)
        wanted = Wanted(True, True, True)
        grads = fused.backward(plan, torch.ones_like(x), x, experts, weights, projected, Routing(*routing), wanted)
    reference = KERNEL_REGISTRY.op("moe_experts").variant(variant).reference
    expected, expected_grads = gradients(reference, tensors)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    order = ("hidden_states", "gate_up_proj", "up_proj", "down_proj", "top_k_weights", "gate_up_bias", "down_bias")
    found = [getattr(grads, name) for name in order if getattr(grads, name) is not None]
    for got, wanted in zip(found, expected_grads, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("align", [1, 16])
@pytest.mark.parametrize("shape", [(300, 3, 5), (1, 1, 1), (64, 2, 40), (0, 2, 4)])
def test_routing_is_a_stable_sort(shape, align):
    from opslot.ops.moe_experts.routing import route

    tokens, top_k, experts = shape
    index = torch.randint(0, experts + 1, (tokens, top_k), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    places, slots, starts, counts, tile_expert = (t.cpu().tolist() for t in route(index, experts, align))
    chosen = index.cpu().flatten().tolist()
    expected_start, used = 0, set()
    for expert in range(experts):
        mine = [slot for slot, e in enumerate(chosen) if e == expert]
        assert starts[expert] == expected_start
        assert counts[expert] == len(mine)
        assert slots[expected_start : expected_start + len(mine)] == mine
        padded = -(-len(mine) // align) * align
        assert tile_expert[expected_start // align : (expected_start + padded) // align] == [expert] * (padded // align)
        used |= set(range(expected_start, expected_start + len(mine)))
        expected_start += padded
    assert starts[experts] == expected_start <= len(slots)
    assert all(slot == -1 for row, slot in enumerate(slots) if row not in used)
    assert all(places[s] == -1 if e == experts else slots[places[s]] == s for s, e in enumerate(chosen))
