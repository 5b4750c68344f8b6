"""Kernels inside `torch.func.grad` and `vjp`, which take no autograd function of the form that kernels have.

The whole call of a kernel becomes one autograd function that they take. It runs on the tensors below the transforms and
keeps their autograd graph, which its backward runs. Nothing here runs outside of transforms.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils import _pytree as pytree

from opslot._base.errors import KernelError

_functorch = torch._C._functorch


def call_in_transform(kernel: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`kernel(*args, **kwargs)` inside transforms of torch.func.

    Gradients reach the tensors in its arguments and the parameters of modules among them.

    Raises:
        RuntimeError: inside vmap and jvp, or where the kernel itself raises it.
        KernelError: the gradients are differentiated again.
    """
    call = _Call(kernel, args, kwargs)
    outputs = _InTransform.apply(call, *call.tensors)
    return call.result(outputs)


class _Call:
    """One call of a kernel.

    Attributes:
        tensors: those among the arguments and the parameters of modules among them, each once.
    """

    def __init__(self, kernel: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.kernel = kernel
        self.leaves, self.spec = pytree.tree_flatten((args, kwargs))
        self.modules = [x for x in self.leaves if isinstance(x, nn.Module)]
        found = [x for x in self.leaves if isinstance(x, Tensor)]
        found += [parameter for module in self.modules for parameter in module.parameters()]
        self.tensors = list({id(x): x for x in found}.values())
        self.needed = [_requires_grad(x) for x in self.tensors]
        self.inputs: list[Tensor] = []
        self.outputs: list[Any] = []

    def run(self, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
        """The flat outputs of the kernel.

        Args:
            tensors: what is below the transforms in those of the call.
        """
        self.inputs = [x.detach().requires_grad_(needed) for x, needed in zip(tensors, self.needed, strict=True)]
        plain = {id(x): own for x, own in zip(self.tensors, self.inputs, strict=True)}
        args, kwargs = pytree.tree_unflatten([plain.get(id(x), x) for x in self.leaves], self.spec)
        with torch.enable_grad(), contextlib.ExitStack() as stack:
            for module in self.modules:
                own = {name: plain[id(x)] for name, x in module.named_parameters()}
                stack.enter_context(_reparametrize_module(module, own))
            self.outputs, self.out_spec = pytree.tree_flatten(self.kernel(*args, **kwargs))
        return tuple([x.detach() if isinstance(x, Tensor) else x for x in self.outputs])

    def result(self, outputs: tuple[Any, ...]) -> Any:
        return pytree.tree_unflatten(list(outputs), self.out_spec)

    def gradients(self, douts: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """By `tensors`; None for those that need none."""
        pairs = [
            (out, dout) for out, dout in zip(self.outputs, douts, strict=True) if dout is not None and out.requires_grad
        ]
        needed = [x for x in self.inputs if x.requires_grad]
        if not pairs or not needed:
            return (None,) * len(self.inputs)
        outputs, given = zip(*pairs, strict=True)
        found = iter(torch.autograd.grad(outputs, needed, given, retain_graph=True, allow_unused=True))
        return tuple([next(found) if x.requires_grad else None for x in self.inputs])


def _requires_grad(x: Tensor) -> bool:
    """Whether `x`, or what transforms wrap in it, requires a gradient."""
    while not x.requires_grad and _functorch.is_functorch_wrapped_tensor(x):
        x = _functorch.get_unwrapped(x)
    return x.requires_grad


class _InTransform(torch.autograd.Function):
    @staticmethod
    def forward(call: _Call, *tensors: Tensor) -> tuple[Any, ...]:
        return call.run(tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.call, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *douts: Tensor | None) -> Any:
        # The gradients depend on the tensors too, which a second derivative must not miss.
        return None, *_Gradients.apply(ctx.call, len(douts), *douts, *ctx.saved_tensors)


class _Gradients(torch.autograd.Function):
    @staticmethod
    def forward(call: _Call, outputs: int, *given: Tensor | None) -> tuple[Tensor | None, ...]:
        return call.gradients(given[:outputs])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *douts: Tensor | None) -> Any:
        raise KernelError(
            "a kernel has no second derivative, which nested transforms of torch.func require",
            hint="set its op to eager",
        )
