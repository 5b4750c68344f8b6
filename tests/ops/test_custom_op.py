"""The helper that makes a differentiable custom op from a launch and its backward."""

import pytest
import torch
from torch import Tensor

from opslot._base.errors import KernelError
from opslot.ops._common.custom_op import differentiable_op


def launch(outputs, x, y, factor):
    out, total = outputs
    torch.mul(x, factor, out=out)
    torch.add(x, x if y is None else y, out=total)


def launch_backward(gradients, dout, dtotal, x, y, factor, need_x, need_y):
    dx, dy = gradients
    if dx is not None:
        dx.zero_()
        if dout is not None:
            dx.add_(dout, alpha=factor)
        if dtotal is not None:
            dx.add_(dtotal, alpha=2.0 if y is None else 1.0)
    if dy is not None:
        dy.zero_() if dtotal is None else dy.copy_(dtotal)


def launch_double(out, x):
    torch.mul(x, 2.0, out=out)


def launch_double_backward(dx, dout, x):
    torch.mul(dout, 2.0, out=dx)


def launch_product(outputs, x, y, power):
    out, factor = outputs
    torch.pow(y, power, out=factor)
    torch.mul(x, factor, out=out)


def launch_product_backward(gradients, dout, x, y, factor, power, need_x, need_y):
    dx, dy = gradients
    if dx is not None:
        torch.mul(dout, factor, out=dx)
    if dy is not None:
        torch.mul(dout * x, power * y ** (power - 1), out=dy)


# Errors name the op and the file of the kernel.
for _function in (launch, launch_double, launch_product):
    _function.__module__ = "opslot.ops.toy.triton"

scale_and_add = differentiable_op(
    "test_scale_and_add(Tensor x, Tensor? y, float factor) -> (Tensor, Tensor)",
    allocate=lambda x, y, factor: (torch.empty_like(x), torch.empty_like(x)),
    launch=launch,
    launch_backward=launch_backward,
)
scale = differentiable_op(
    "test_scale(Tensor x, float factor) -> Tensor",
    allocate=lambda x, factor: torch.empty_like(x),
    launch=lambda out, x, factor: torch.mul(x, factor, out=out),
    launch_backward=lambda dx, dout, x, factor: torch.mul(dout, factor, out=dx),
)
double = differentiable_op(
    "test_double(Tensor x) -> Tensor",
    allocate=torch.empty_like,
    launch=launch_double,
    launch_backward=launch_double_backward,
)
product = differentiable_op(
    "test_product(Tensor x, Tensor y, int power) -> (Tensor out, Tensor factor)",
    allocate=lambda x, y, power: (torch.empty_like(x), torch.empty_like(x)),
    launch=launch_product,
    launch_backward=launch_product_backward,
    kept=("x", "y", "factor"),
    returned=1,
)


def expected(x, y, factor):
    return x * factor, x + (x if y is None else y)


def gradients_of(function, x: Tensor, y: Tensor | None, used) -> list[Tensor | None]:
    outputs = function(x, y, 3.0)
    leaves = [t for t in (x, y) if t is not None and t.requires_grad]
    return list(torch.autograd.grad(sum(outputs[i].square().sum() for i in used), leaves))


@pytest.mark.quick("*-False", "False-False-used2-True", "True-True-used0-True", "True-True-used1-True")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize(("with_y", "y_needs"), [(False, False), (True, False), (True, True)])
def test_outputs_and_gradients(compiled, used, with_y, y_needs):
    torch._dynamo.reset()
    x = torch.randn(3, 4, requires_grad=True)
    y = torch.randn(3, 4, requires_grad=y_needs) if with_y else None
    function = torch.compile(scale_and_add, fullgraph=True, backend="aot_eager") if compiled else scale_and_add
    torch.testing.assert_close(function(x, y, 3.0), expected(x, y, 3.0))
    if not (y_needs and used == (0,)):
        torch.testing.assert_close(gradients_of(function, x, y, used), gradients_of(expected, x, y, used))


@pytest.mark.parametrize("compiled", [False, True])
def test_one_differentiable_argument(compiled):
    torch._dynamo.reset()
    function = torch.compile(double, fullgraph=True, backend="aot_eager") if compiled else double
    x = torch.randn(5, requires_grad=True)
    (gradient,) = torch.autograd.grad(function(x).sum(), x)
    assert torch.equal(gradient, torch.full_like(x, 2.0))


@pytest.mark.parametrize("compiled", [False, True])
def test_outputs_that_are_kept_for_backward_are_not_returned(compiled):
    torch._dynamo.reset()
    x, y = (torch.randn(2, 3, requires_grad=True) for _ in range(2))
    function = torch.compile(product, fullgraph=True, backend="aot_eager") if compiled else product
    out = function(x, y, 3)
    torch.testing.assert_close(out, x * y**3)
    found = torch.autograd.grad(out.square().sum(), (x, y))
    torch.testing.assert_close(found, torch.autograd.grad((x * y**3).square().sum(), (x, y)))
    (dy,) = torch.autograd.grad(function(x.detach(), y, 3).sum(), y)
    torch.testing.assert_close(dy, 3 * x.detach() * y.detach() ** 2)


def test_compiles_without_gradients():
    """A forward whose signature has as many parameters as it got arguments, without ctx."""
    torch._dynamo.reset()
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    for function, arguments in ((scale_and_add, (x, y, 3.0)), (scale, (x, 3.0)), (double, (x,))):
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        with torch.no_grad():
            torch.testing.assert_close(compiled(*arguments), function(*arguments))


def test_ops_pass_opcheck():
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    ops = torch.ops.opslot
    torch.library.opcheck(ops.test_scale_and_add.default, (x, y, 3.0))
    torch.library.opcheck(ops.test_scale_and_add.default, (x, None, 3.0))
    torch.library.opcheck(ops.test_scale_and_add_backward.default, (x, None, x, y, 3.0, True, False))
    torch.library.opcheck(ops.test_double_backward.default, (x, y))


def test_unneeded_gradients_are_not_allocated():
    dx, dy = torch.ops.opslot.test_scale_and_add_backward(*torch.randn(4, 3, 4).unbind(), 3.0, False, True)
    assert dx.numel() == 0
    assert dy.shape == (3, 4)


def test_second_derivative_raises():
    x = torch.randn(5, requires_grad=True)
    with pytest.raises(KernelError, match=r"toy: a kernel of triton\.py has no second derivative"):
        torch.autograd.grad(double(x).square().sum(), x, create_graph=True)


def test_backward_through_an_exported_op_raises():
    class Double(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(5))

        def forward(self, x):
            return double(x * self.weight)

    module, x = Double(), torch.randn(5)
    exported = torch.export.export(module, (x,), strict=False).module()
    assert torch.equal(exported(x), module(x))
    with pytest.raises(KernelError, match=r"opslot::test_double has no derivative .*\n.*bind\(model, 'eager'\)"):
        exported(x).sum().backward()
