"""Registration of kernels as `torch.ops.opslot.*` and the refusals that they share.

A kernel's launch is an opaque op with a fake implementation, and an autograd.Function around two such ops makes it
differentiable: torch.compile keeps the graph whole, and eager code pays one dispatch instead of custom_op's layers
of Python.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from opslot._base.errors import KernelError

# Registrations live as long as the library object.
_LIBRARY = torch.library.Library("opslot", "FRAGMENT")


def opaque_op(schema: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Define `opslot::<schema>`, implemented on every device by the decorated function; returns the op's overload.

    Args:
        schema: e.g. "swiglu(Tensor gate, Tensor up) -> Tensor".
        fake: the same signature; returns empty outputs of the right shape, dtype and strides.
    """
    name = schema.partition("(")[0]

    def register(function: Callable[..., Any]) -> Any:
        _LIBRARY.define(schema)
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"opslot::{name}", fake, lib=_LIBRARY)
        return getattr(torch.ops.opslot, name).default

    return register


def refuse(kernel: str, argument: str, found: str, instead: str) -> NoReturn:
    """Raise the KernelError for an argument that a kernel does not serve.

    Args:
        kernel: its configuration, e.g. "rms_norm_implementation='triton'".
        argument: the argument's name.
        found: what it is, against what the kernel takes.
        instead: what serves it.
    """
    raise KernelError(f"{kernel} cannot take {argument}: {found}\n  to do: {instead}")


def as_rows(x: Tensor) -> Tensor:
    """`x` as [rows, width] with adjacent columns: a view unless its leading dimensions have no common stride."""
    rows = x.reshape(-1, x.shape[-1]) if x.numel() else x.new_empty(0, x.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()
