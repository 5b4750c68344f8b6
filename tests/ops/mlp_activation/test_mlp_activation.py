"""mlp_activation: cases that the parity harness does not cover."""

import numpy as np
import pytest
import torch
from torch import nn

from opslot import KERNEL_REGISTRY
from opslot._base.errors import KernelError
from opslot.ops.mlp_activation import op

activations = pytest.importorskip("transformers.activations")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KERNELS = {"relu2": "triton", "gelu_tanh": "torch_fused", "quick_gelu": "triton", "xielu": "triton"}
VARIANTS = tuple(KERNELS)
TRITON = [variant for variant, kernel in KERNELS.items() if kernel == "triton"]


def load(variant):
    return KERNEL_REGISTRY.load("mlp_activation", variant, KERNELS[variant])


def module_of(variant, dtype=torch.float32):
    """The activation of Transformers, with alphas that differ."""
    if variant != "xielu":
        return activations.ACT2FN["gelu_new" if variant == "gelu_tanh" else variant]
    module = activations.ACT2CLS["xielu"](dtype=dtype)
    with torch.no_grad():
        module.alpha_p += 0.5
    return module.to(DEVICE)


def scalars(module):
    """The further arguments of the op."""
    return (module.alpha_p, module.alpha_n, module.beta, module.eps) if hasattr(module, "alpha_p") else ()


def rows(shape=(4, 24), dtype=torch.float32, scale=2.0):
    generator = torch.Generator().manual_seed(0)
    return (scale * torch.randn(shape, generator=generator)).to(DEVICE, dtype).requires_grad_()


def gradients(function, x, scalars, dout=None):
    """Output and gradients of x and of the scalars that have one."""
    out = function(x, *scalars)
    leaves = [x, *(s for s in scalars if s.requires_grad)]
    return out, *torch.autograd.grad(out, leaves, out.detach().sin() if dout is None else dout)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_reference_equals_transformers_bit_for_bit(variant, dtype):
    module, x = module_of(variant, dtype), rows(dtype=dtype)
    found = gradients(getattr(op, variant), x, scalars(module))
    expected = gradients(lambda x, *_: module(x), x, scalars(module))
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("variant", VARIANTS)
def test_extreme_values_and_nan(variant):
    """Also at zero and around eps, where the derivative is discontinuous."""
    inputs = [0.0, -0.0, -1.1e-6, -9e-7, -5e-7, -1e-5, 1e-6, 60.0, -60.0, -0.25, -200.0, float("nan")]
    x = torch.tensor(inputs, device=DEVICE).requires_grad_()
    module = module_of(variant)
    # In the interpreter, NumPy warns about NaN and overflow.
    with np.errstate(invalid="ignore", under="ignore", over="ignore"):
        out, dx, *_ = gradients(load(variant), x, scalars(module), torch.ones_like(x))
    wanted, wanted_dx, *_ = gradients(getattr(op, variant), x, scalars(module), torch.ones_like(x))
    torch.testing.assert_close(out, wanted, rtol=2e-6, atol=1e-12, equal_nan=True)
    torch.testing.assert_close(dx, wanted_dx, rtol=2e-6, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("layout", ["expanded", "transposed", "every second column"])
def test_gradients_with_any_layout(variant, layout):
    x, module = rows((4, 6, 24)), module_of(variant)
    dout = {
        "expanded": torch.ones((), device=DEVICE).expand(4, 6, 24),
        "transposed": torch.randn(6, 4, 24, device=DEVICE).transpose(0, 1),
        "every second column": torch.randn(4, 6, 48, device=DEVICE)[..., ::2],
    }[layout]
    found = gradients(load(variant), x, scalars(module), dout)
    expected = gradients(getattr(op, variant), x, scalars(module), dout)
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_only_required_gradients_are_computed():
    x, module = rows(), module_of("xielu")
    alpha_p, alpha_n, beta, eps = scalars(module)
    kernel, dout = load("xielu"), torch.randn_like(x)
    _, *expected = gradients(kernel, x, (alpha_p, alpha_n, beta, eps), dout)
    _, dx, dalpha_n = gradients(kernel, x, (alpha_p.detach(), alpha_n, beta, eps), dout)
    assert torch.equal(dalpha_n, expected[2])
    assert torch.equal(dx, expected[0])
    (dx,) = gradients(kernel, x, (alpha_p.detach(), alpha_n.detach(), beta, eps), dout)[1:]
    assert torch.equal(dx, expected[0])
    (dalpha_p,) = torch.autograd.grad(kernel(x.detach(), alpha_p, alpha_n.detach(), beta, eps), alpha_p, dout)
    assert torch.equal(dalpha_p, expected[1])


def test_gradients_of_alphas_are_the_same_in_every_run():
    x, module = rows((5, 4099)), module_of("xielu")
    first, second = (gradients(load("xielu"), x, scalars(module)) for _ in range(2))
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize(
    ("dtype", "alphas", "expected"),
    [
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float32, torch.bfloat16, torch.float32),
    ],
)
def test_dtypes_promote(dtype, alphas, expected):
    x, module = rows(dtype=dtype), module_of("xielu", alphas)
    for function in (load("xielu"), op.xielu):
        out, dx, dalpha_p, dalpha_n = gradients(function, x, scalars(module))
        assert (out.dtype, dx.dtype, dalpha_p.dtype, dalpha_n.dtype) == (expected, dtype, alphas, alphas)


def test_autocast_keeps_the_dtype_of_the_projection():
    x, module = rows(dtype=torch.bfloat16), module_of("xielu")
    with torch.autocast(DEVICE, torch.bfloat16):
        out, dx, dalpha_p, _ = gradients(load("xielu"), x, scalars(module))
        wanted = op.xielu(x, *scalars(module))
    assert (out.dtype, dx.dtype, dalpha_p.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    # The kernel rounds once. On a CPU, autocast computes some of the steps in bfloat16.
    torch.testing.assert_close(out, wanted.bfloat16(), rtol=2e-2, atol=2e-2)


def test_zero_tokens():
    for variant in VARIANTS:
        x, module = rows((0, 24)), module_of(variant)
        out, dx, *dalphas = gradients(load(variant), x, scalars(module))
        assert (out.shape, dx.shape) == (x.shape, x.shape)
        assert all(torch.equal(dalpha, torch.zeros_like(dalpha)) for dalpha in dalphas)


@pytest.mark.parametrize("variant", TRITON)
def test_backward_keeps_only_the_input(variant):
    x, module = rows(), module_of(variant)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: (kept.append(tensor), tensor)[1], lambda x: x):
        load(variant)(x, *scalars(module))
    assert [tensor.data_ptr() for tensor in kept if tensor.numel() > 1] == [x.data_ptr()]


@pytest.mark.parametrize("variant", VARIANTS)
def test_backward_runs_twice_and_keeps_the_input(variant):
    x, module = rows(), module_of(variant)
    before = x.detach().clone()
    out = load(variant)(x, *scalars(module)).square().sum()
    first, second = (torch.autograd.grad(out, x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(x, before)


@pytest.mark.parametrize("variant", TRITON)
def test_double_backward_raises(variant):
    x, module = rows(), module_of(variant)
    out = load(variant)(x, *scalars(module)).square().sum()
    with pytest.raises(KernelError, match=r"mlp_activation: a kernel of triton.py has no second derivative"):
        torch.autograd.grad(out, x, create_graph=True)


@pytest.mark.parametrize("variant", VARIANTS)
def test_compiles_with_fullgraph(variant):
    x, module = rows(), module_of(variant)
    compiled = torch.compile(load(variant), fullgraph=True, backend="aot_eager")
    found, expected = (gradients(function, x, scalars(module)) for function in (compiled, load(variant)))
    assert all(map(torch.equal, found, expected))


def test_opcheck():
    load("xielu")
    x, ops = rows().detach(), torch.ops.opslot
    module = module_of("xielu")
    numbers = [s.detach() for s in scalars(module)]
    torch.library.opcheck(ops.mlp_activation.default, (x, "quick_gelu"))
    torch.library.opcheck(ops.mlp_activation_backward.default, (x, x, "quick_gelu"))
    torch.library.opcheck(ops.mlp_xielu.default, (x, *numbers, False))
    torch.library.opcheck(ops.mlp_xielu_backward.default, (x, x, *numbers, False, True, True, False))


def test_unsupported_inputs_raise():
    label = "mlp_activation_implementation='triton' cannot take"
    with pytest.raises(KernelError, match=rf"{label} x: its dtype is torch.float64"):
        load("relu2")(torch.zeros(2, 4, dtype=torch.float64))
    alpha_p, *others = scalars(module_of("xielu"))
    with pytest.raises(KernelError, match=rf"{label} alpha_p: its shape is \(4,\), not one element"):
        load("xielu")(rows(), alpha_p.expand(4), *others)


@pytest.mark.parametrize("name", ["gelu_new", "gelu_fast", "gelu_accurate"])
def test_activations_that_are_gelu_by_tanh(name):
    module, x = activations.ACT2FN[name], rows()
    assert op.OP.applies_to(module, None) == "gelu_tanh"
    found, expected = (gradients(function, x, ()) for function in (load("gelu_tanh"), module))
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_applies_to_classes_of_transformers_alone(variant):
    module = module_of(variant)
    assert op.OP.applies_to(module, None) == variant
    derived = type(type(module).__name__, (type(module),), {"forward": lambda self, x: x})
    module.__class__ = derived
    assert op.OP.applies_to(module, None) is None
    assert op.OP.applies_to(nn.GELU(), None) is None
    assert op.OP.applies_to(activations.ACT2FN["gelu_pytorch_tanh"], None) is None
