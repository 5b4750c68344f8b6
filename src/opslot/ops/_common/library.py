"""Registration of kernels as `torch.ops.opslot.*` and the refusals that they share.

A kernel's launch is an opaque op with a fake implementation, and an autograd.Function around two such ops makes it
differentiable: torch.compile keeps the graph whole. Eager code calls the op's Python function itself, since at common
sizes the dispatcher's way to it costs a good part of what the kernel does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable as torch_once_differentiable

from opslot._base.errors import KernelError

# Registrations live as long as the library object.
_LIBRARY = torch.library.Library("opslot", "FRAGMENT")
# Other tensors (fake, distributed, functional) have no memory of their own for a kernel to read.
_PLAIN = (Tensor, nn.Parameter)


def opaque_op(schema: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Define `opslot::<schema>`, implemented on every device by the decorated function.

    Args:
        schema: e.g. "swiglu(Tensor gate, Tensor up) -> Tensor"; the first argument a tensor, no lists of tensors.
        fake: the same signature; returns empty outputs of the right shape, dtype and strides.

    Returns:
        A function that calls the op under torch.compile and for tensor subclasses, else the decorated function. One of
        several outputs may be None where nobody needs it; the op itself returns an empty tensor there.
    """
    name = schema.partition("(")[0]

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        _LIBRARY.define(schema)
        _LIBRARY.impl(name, _filled(function), "CompositeExplicitAutograd")
        torch.library.register_fake(f"opslot::{name}", _filled(fake), lib=_LIBRARY)
        overload = getattr(torch.ops.opslot, name).default

        def call(*args: Any) -> Any:
            if torch.compiler.is_compiling():
                return overload(*args)
            for arg in args:
                if isinstance(arg, Tensor) and type(arg) not in _PLAIN:
                    return overload(*args)
            return function(*args)

        return call

    return register


def _filled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with an empty tensor in the place of every None among its outputs."""

    def filled(first: Tensor, *args: Any) -> Any:
        outputs = function(first, *args)
        if isinstance(outputs, tuple):
            return tuple([first.new_empty(0) if output is None else output for output in outputs])
        return outputs

    return filled


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse second derivatives of a kernel's backward, which knows none.

    torch's own decorator misses those through the saved tensors: under `create_graph` it returns constants where no
    incoming gradient needs one itself, as below every loss, and what is built on them is wrong without a word.
    """
    _, op, kernel = backward.__module__.rsplit(".", 2)
    guarded = torch_once_differentiable(backward)

    @functools.wraps(backward)
    def call(ctx: Any, *douts: Tensor | None) -> Any:
        if not torch.is_grad_enabled():
            return backward(ctx, *douts)
        if not torch.compiler.is_compiling():
            raise KernelError(
                f"{op}: a kernel of {kernel}.py has no second derivative, which create_graph=True asks for",
                hint=f"set {op} to eager, or leave create_graph out",
            )
        return guarded(ctx, *douts)

    return call


def refuse(kernel: str, argument: str, found: str, instead: str) -> NoReturn:
    """Raise the KernelError for an argument that a kernel does not serve.

    Args:
        kernel: its configuration, e.g. "rms_norm_implementation='triton'".
        argument: the argument's name.
        found: what it is, against what the kernel takes.
        instead: what serves it.
    """
    raise KernelError(
        f"{kernel} cannot take {argument}: {found}",
        hint=instead,
    )


def as_rows(x: Tensor) -> tuple[Tensor, int]:
    """`x` as rows with adjacent columns, and their stride: `x` itself if contiguous, else a view or, last, a copy."""
    if x.is_contiguous():
        return x, x.shape[-1]
    rows = x.reshape(-1, x.shape[-1])
    if rows.stride(1) != 1 and rows.shape[1] != 1:
        rows = rows.contiguous()
    return rows, rows.stride(0)
