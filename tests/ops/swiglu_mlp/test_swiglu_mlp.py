"""swiglu_mlp: cases that the parity harness does not cover."""

import functools
import types

import numpy as np
import pytest
import torch
from torch import nn

from opslot import KERNEL_REGISTRY
from opslot._base.device import CPU, DeviceFacts
from opslot._base.errors import ConfigError, KernelError
from opslot.ops._common.activations import ACTIVATIONS, activation_name
from opslot.ops.swiglu_mlp import op
from opslot.slots import KernelRequest

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def load(variant):
    return KERNEL_REGISTRY.load("swiglu_mlp", variant, "triton")


def pair(shape=(4, 24), dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(DEVICE, dtype).requires_grad_() for _ in range(2)]


def test_reference_equals_transformers_bit_for_bit():
    activations = pytest.importorskip("transformers.activations")
    gate, up = (torch.randn(3, 40, dtype=torch.bfloat16) for _ in range(2))
    expected = activations.ACT2FN["silu"](gate) * up
    assert torch.equal(op.standard(gate, up), expected)
    assert torch.equal(op.fused_gate_up(torch.cat((gate, up), dim=-1)), expected)


def test_clamped_reference_equals_gpt_oss_bit_for_bit():
    upstream = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    gate_up = 6 * torch.randn(3, 80, dtype=torch.bfloat16)
    experts = types.SimpleNamespace(limit=7.0, alpha=1.702)
    expected = upstream.GptOssExperts._apply_gate(experts, gate_up)
    assert torch.equal(op.clamped(gate_up[..., ::2], gate_up[..., 1::2], 7.0, 1.702, 1.0), expected)


def test_clamped_reference_equals_deepseek_v4_bit_for_bit():
    upstream = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    mlp = types.SimpleNamespace(
        gate_proj=nn.Linear(16, 24), up_proj=nn.Linear(16, 24), down_proj=nn.Identity(), act_fn=nn.SiLU(), limit=0.5
    )
    x = 3 * torch.randn(5, 16)
    assert torch.equal(op.clamped(mlp.gate_proj(x), mlp.up_proj(x), 0.5), upstream.DeepseekV4MLP.forward(mlp, x))


@pytest.mark.parametrize("kernel", ["eager", "triton"])
def test_clamped_values_have_no_gradient(kernel):
    """The gate is clamped from above only; at a limit, releases of torch differ in the gradient."""
    function = op.clamped if kernel == "eager" else KERNEL_REGISTRY.load("swiglu_mlp", "clamped", "triton")
    gate = torch.tensor([-9.0, 2.0, 2.5, 1.0, 1.0, 1.0], device=DEVICE, requires_grad=True)
    up = torch.tensor([1.0, 1.0, 1.0, -2.0, -2.5, 2.5], device=DEVICE, requires_grad=True)
    dgate, dup = torch.autograd.grad(function(gate, up, 2.0).sum(), (gate, up))
    at_limit = torch.tensor(2.0, requires_grad=True)
    at_limit.clamp(max=2.0).backward()
    passes = at_limit.grad == 1
    assert (dgate != 0).tolist() == [True, passes, False, True, True, True]
    assert (dup != 0).tolist() == [True, True, True, passes, False, False]
    # Values beyond the limits give the same result as the limits.
    inside = function(gate.clamp(max=2.0), up.clamp(-2.0, 2.0), 2.0)
    assert torch.equal(function(gate, up, 2.0), inside)


def test_clamped_propagates_nan():
    """A clamp that hides NaN would hide that a run has diverged."""
    gate, up = (torch.tensor([float("nan"), 1.0, 9.0], device=DEVICE)[list(order)] for order in ((0, 1, 2), (1, 0, 2)))
    out = KERNEL_REGISTRY.load("swiglu_mlp", "clamped", "triton")(gate, up, 2.0)
    assert out.isnan().tolist() == [True, True, False]


def test_fused_gate_up_equals_standard_on_the_halves():
    gate, up = pair()
    gate_up = torch.cat((gate, up), dim=-1).detach().requires_grad_()
    out = load("fused_gate_up")(gate_up)
    assert torch.equal(out, load("standard")(gate, up))
    (found,) = torch.autograd.grad(out.square().sum(), gate_up)
    expected = torch.autograd.grad(load("standard")(gate, up).square().sum(), (gate, up))
    assert torch.equal(found, torch.cat(expected, dim=-1))


def test_only_required_gradients_are_computed():
    gate, up = pair()
    kernel = load("standard")
    dgate, dup = torch.autograd.grad(kernel(gate, up).square().sum(), (gate, up))
    (only_gate,) = torch.autograd.grad(kernel(gate, up.detach()).square().sum(), gate)
    (only_up,) = torch.autograd.grad(kernel(gate.detach(), up).square().sum(), up)
    assert torch.equal(only_gate, dgate)
    assert torch.equal(only_up, dup)
    empty, whole = torch.ops.opslot.swiglu_backward(gate, gate, up, "silu", False, True)
    assert (empty.numel(), whole.shape) == (0, up.shape)


@pytest.mark.parametrize("variant", ["standard", "fused_gate_up"])
@pytest.mark.parametrize("layout", ["expanded", "transposed", "every second column"])
def test_gradients_with_any_layout(variant, layout):
    gate, up = pair((4, 6, 24))
    inputs = (gate, up) if variant == "standard" else (torch.cat((gate, up), dim=-1).detach().requires_grad_(),)
    dout = {
        "expanded": torch.ones((), device=DEVICE).expand(4, 6, 24),
        "transposed": torch.randn(6, 4, 24, device=DEVICE).transpose(0, 1),
        "every second column": torch.randn(4, 6, 48, device=DEVICE)[..., ::2],
    }[layout]
    found = torch.autograd.grad(load(variant)(*inputs), inputs, dout)
    expected = torch.autograd.grad(getattr(op, variant)(*inputs), inputs, dout)
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_backward_runs_twice_and_keeps_the_inputs():
    gate, up = pair()
    before = gate.detach().clone(), up.detach().clone()
    out = load("standard")(gate, up).square().sum()
    first = torch.autograd.grad(out, (gate, up), retain_graph=True)
    second = torch.autograd.grad(out, (gate, up))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert torch.equal(gate, before[0])
    assert torch.equal(up, before[1])


@pytest.mark.parametrize("value", [-200.0, 200.0, 0.0])
def test_extreme_gates(value):
    gate = torch.full((1, 8), value, device=DEVICE, requires_grad=True)
    up = torch.full((1, 8), 3.0, device=DEVICE, requires_grad=True)
    # The interpreter uses NumPy's exp, which warns on overflow.
    with np.errstate(over="ignore"):
        out = load("standard")(gate, up)
        dgate, dup = torch.autograd.grad(out.sum(), (gate, up))
    slope = {-200.0: 0.0, 200.0: 1.0, 0.0: 0.5}[value]
    assert torch.equal(out, torch.full_like(out, 3.0 * max(value, 0.0)))
    assert torch.equal(dgate, torch.full_like(out, 3.0 * slope))
    assert torch.equal(dup, torch.full_like(out, max(value, 0.0)))


def test_same_tensor_as_gate_and_up():
    (x, _) = pair()
    (found,) = torch.autograd.grad(load("standard")(x, x).sum(), x)
    (expected,) = torch.autograd.grad(op.standard(x, x).sum(), x)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_mixed_dtypes_promote():
    gate, up = pair()
    gate = gate.detach().to(torch.bfloat16).requires_grad_()
    out = load("standard")(gate, up)
    assert out.dtype == torch.float32
    dgate, dup = torch.autograd.grad(out.sum(), (gate, up))
    assert (dgate.dtype, dup.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("variant", ["standard", "fused_gate_up", "clamped"])
def test_compiles_with_fullgraph(variant):
    inputs = tuple(pair()[:1]) if variant == "fused_gate_up" else tuple(pair())
    kernel = load(variant)
    if variant == "clamped":
        kernel = functools.partial(kernel, limit=1.0, alpha=1.702)
    compiled = torch.compile(kernel, fullgraph=True, backend="aot_eager")
    expected = torch.autograd.grad(kernel(*inputs).square().sum(), inputs)
    found = torch.autograd.grad(compiled(*inputs).square().sum(), inputs)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_opcheck():
    load("standard")
    gate, up = (x.detach() for x in pair())
    ops = torch.ops.opslot
    torch.library.opcheck(ops.swiglu.default, (gate, up, "gelu_tanh"))
    torch.library.opcheck(ops.swiglu_backward.default, (up, gate, up, "gelu_tanh", True, True))
    torch.library.opcheck(ops.swiglu_clamped.default, (gate, up, "silu", 1.5, 1.702, 1.0))
    torch.library.opcheck(ops.swiglu_clamped_backward.default, (up, gate, up, "silu", 1.5, 1.702, 1.0, False, True))
    torch.library.opcheck(ops.swiglu_fused.default, (gate, "relu2"))
    torch.library.opcheck(ops.swiglu_fused_backward.default, (gate[:, :12], gate, "relu2"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(2, 4, dtype=torch.float64), torch.zeros(2, 4)), "gate: its dtype is torch.float64"),
        ((torch.zeros(2, 4), torch.zeros(1, 4)), "use eager, which broadcasts"),
    ],
)
def test_triton_unsupported_inputs_raise(arguments, message):
    with pytest.raises(KernelError, match=message) as caught:
        load("standard")(*arguments)
    assert "swiglu_mlp_implementation='triton'" in str(caught.value)


def test_triton_odd_fused_size_raises():
    with pytest.raises(KernelError, match="its width 5 is odd"):
        load("fused_gate_up")(torch.zeros(2, 5))


def test_activations_of_transformers_are_known_by_name():
    """Every name of ACT2FN either computes what the kernel of its name does, or is unsupported with a reason."""
    activations = pytest.importorskip("transformers.activations")
    x = torch.linspace(-6, 6, 97)
    known = {}
    for name in activations.ACT2FN:
        if name == "xielu":  # has parameters on a GPU
            continue
        module = activations.ACT2FN[name]
        found = activation_name(module)
        problem = op.OP.variant("standard").check_module(types.SimpleNamespace(act_fn=module))
        assert (problem is None) == (found is not None)
        if found is None:
            assert type(module).__name__ in problem
        else:
            known[name] = found
            torch.testing.assert_close(ACTIVATIONS[found](x), module(x), rtol=1e-4, atol=2e-6)
    assert {name: known[name] for name in ("silu", "gelu", "quick_gelu", "relu", "relu2")} == {
        name: name for name in ("silu", "gelu", "quick_gelu", "relu", "relu2")
    }
    assert (known["swish"], known["gelu_pytorch_tanh"], known["gelu_new"]) == ("silu", "gelu_tanh", "gelu_tanh")
    # Another function that only resembles GELU.
    assert "gelu_10" not in known


@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_reference_is_the_activation_times_up(name):
    gate, up = (torch.randn(3, 40) for _ in range(2))
    expected = ACTIVATIONS[name](gate) * up
    assert torch.equal(op.standard(gate, up, name), expected)
    torch.testing.assert_close(op.fused_gate_up(torch.cat((gate, up), dim=-1), name), expected)


@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_triton_activation_and_its_slope(name):
    """Also where the derivative is discontinuous or vanishes, and for NaN."""
    x = torch.cat((torch.linspace(-12, 12, 241), torch.tensor([0.0, -60.0, 60.0, float("nan")])))
    gate = x.to(DEVICE).requires_grad_()
    up = torch.full_like(gate, 1.5).detach()
    # The interpreter uses NumPy's exp, which warns on overflow.
    with np.errstate(over="ignore", invalid="ignore"):
        (found,) = torch.autograd.grad((out := load("standard")(gate, up, name))[:-1].sum(), gate)
    wide = x.double().requires_grad_()
    (expected,) = torch.autograd.grad((wanted := op.standard(wide, up.cpu().double(), name))[:-1].sum(), wide)
    torch.testing.assert_close(out.cpu()[:-1].double(), wanted[:-1], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.cpu()[:-1].double(), expected[:-1], rtol=1e-5, atol=1e-6)
    assert out[-1].isnan()


def test_activation_is_a_name_module_or_function():
    gate, up = pair()
    expected = load("standard")(gate, up, "gelu_tanh")
    for activation in (nn.GELU("tanh"), pytest.importorskip("transformers.activations").ACT2FN["gelu_pytorch_tanh"]):
        assert torch.equal(load("standard")(gate, up, activation), expected)
    assert torch.equal(load("standard")(gate, up, nn.functional.silu), load("standard")(gate, up))


def test_activation_that_triton_does_not_have_raises():
    gate, up = pair()
    with pytest.raises(KernelError, match="its activation is Tanh, the kernels compute silu"):
        load("standard")(gate, up, nn.Tanh())


def test_modules_without_a_known_activation_are_unsupported():
    check_module = op.OP.variant("standard").check_module
    activations = pytest.importorskip("transformers.activations")
    for name in ("silu", "gelu_pytorch_tanh"):
        assert check_module(types.SimpleNamespace(act_fn=activations.ACT2FN[name])) is None
    assert check_module(types.SimpleNamespace(activation_fn=nn.functional.silu)) is None
    assert "its activation is Mish" in check_module(types.SimpleNamespace(act_fn=nn.Mish()))
    assert "activation is unknown" in check_module(nn.Linear(1, 1))
    clamped = op.OP.variant("clamped").check_module
    assert clamped(nn.Linear(1, 1)) is None
    assert clamped(types.SimpleNamespace(act_fn=nn.SiLU())) is None
    assert "not SiLU" in clamped(types.SimpleNamespace(act_fn=nn.GELU()))


def test_liger_serves_only_its_activations():
    for activation, problem in ((nn.SiLU(), None), (nn.GELU("tanh"), None), (nn.ReLU(), "found relu")):
        mlp = types.SimpleNamespace(act_fn=activation, down_proj=nn.Linear(4096, 8))
        spec = next(s for s in KERNEL_REGISTRY.specs("swiglu_mlp") if s.name == "liger_kernel")
        found = spec.supports(KernelRequest("swiglu_mlp", "standard", DeviceFacts("gpu", (9, 0)), torch.bfloat16, mlp))
        assert found is None if problem is None else problem in found


def test_auto_is_eager_on_cpu_and_triton_on_a_gpu():
    def chosen(device):
        return KERNEL_REGISTRY.resolve(KernelRequest("swiglu_mlp", "standard", device, torch.bfloat16)).chosen

    assert chosen(CPU) == "eager"
    assert chosen(DeviceFacts("gpu", (9, 0))) == "triton"


@pytest.mark.parametrize(
    ("variant", "width", "expected"),
    [
        ("standard", 768, "eager"),
        ("standard", 1536, "triton"),
        ("clamped", 768, "triton"),
        ("fused_gate_up", 768, "triton"),
    ],
)
def test_auto_is_eager_where_launch_overhead_exceeds_the_gain(variant, width, expected, monkeypatch):
    monkeypatch.setattr("opslot.slots.spec.has_package", lambda name: True)
    mlp = types.SimpleNamespace(down_proj=nn.Linear(width, 8))
    request = KernelRequest("swiglu_mlp", variant, DeviceFacts("gpu", (9, 0)), torch.bfloat16, mlp)
    assert KERNEL_REGISTRY.resolve(request).chosen == expected
    named = KERNEL_REGISTRY.resolve(request, "triton")
    assert (named.chosen, named.explicit) == ("triton", True)


def test_liger_is_unsupported_for_fused_gate_up():
    request = KernelRequest("swiglu_mlp", "fused_gate_up", DeviceFacts("gpu", (9, 0)), torch.bfloat16)
    with pytest.raises(ConfigError, match="'liger_kernel' serves only the variant standard"):
        KERNEL_REGISTRY.resolve(request, "liger_kernel")
