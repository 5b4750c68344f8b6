"""Helpers for kernel arguments: reject unsupported ones, and view tensors as rows."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor

from opslot._base.errors import KernelError
from opslot._base.kernel_launch import cdiv
from opslot.ops._common.specs import FLOATS, unsupported_dtype


def reject(kernel: str, argument: str, found: str, hint: str) -> NoReturn:
    """Raise the KernelError for an unsupported argument.

    Args:
        kernel: its configuration, e.g. "rms_norm_implementation='triton'".
        argument: the argument's name.
        found: what it is, and what the kernel supports.
        hint: what supports it.
    """
    raise KernelError(f"{kernel} cannot take {argument}: {found}", hint=hint)


def require_floats(kernel: str, hint: str = "use eager", /, **tensors: Tensor | None) -> None:
    """Raise KernelError for an argument whose dtype is not in `FLOATS`; see `reject`."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype not in FLOATS:
            reject(kernel, name, unsupported_dtype(tensor.dtype), hint)


def require_shapes(kernel: str, /, **tensors: tuple[Tensor | None, tuple[int, ...]]) -> None:
    """Raise KernelError for an argument whose shape is not the one beside it; see `reject`."""
    for name, (tensor, shape) in tensors.items():
        if tensor is not None and tensor.shape != shape:
            reject(kernel, name, f"its shape is {tuple(tensor.shape)}", f"give it the shape {shape}")


def in_autocast_dtype(x: Tensor, *others: Any) -> tuple[Any, ...]:
    """Tensors in autocast's dtype where it is on, as it casts the arguments of torch's matmuls and attention.

    Args:
        others: tensors, or None for arguments that were not given.
    """
    tensors, dtype = (x, *others), autocast_dtype(x)
    if dtype is None:
        return tensors
    return tuple(t if t is None or t.dtype == torch.float64 else t.to(dtype) for t in tensors)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Autocast's dtype on the device of `x`; None where autocast is off, and on devices without, such as meta."""
    device = x.device.type
    # Without torch.amp.is_autocast_available, which breaks graphs of torch 2.11.
    if device == "meta" or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """A context that turns autocast off on the device of `x`; devices without autocast, such as meta, need none."""
    device = x.device.type
    return nullcontext() if device == "meta" else torch.autocast(device, enabled=False)


def upcast(x: Tensor) -> Tensor:
    """`x` in float32; float64 stays."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def in_one_dtype(*tensors: Tensor) -> list[Tensor]:
    """Tensors in the dtype that theirs promote to."""
    dtype = functools.reduce(torch.promote_types, [x.dtype for x in tensors])
    return [x.to(dtype) for x in tensors]


def as_rows(x: Tensor) -> tuple[Tensor, int]:
    """`x` as 2-D rows with adjacent columns, and their stride. Copies only if no view is possible."""
    if x.is_contiguous():
        return x, x.shape[-1]
    rows = x.reshape(-1, x.shape[-1])
    if rows.stride(1) != 1 and rows.shape[1] != 1:
        rows = rows.contiguous()
    return rows, rows.stride(0)


def elementwise_layout(
    block: int, *tensors: Tensor
) -> tuple[tuple[Tensor, ...], tuple[int, ...], tuple[int, int, int], int]:
    """(tensors as rows, columns and row strides, grid, blocks of a row); contiguous tensors are one long row."""
    if all(x.is_contiguous() for x in tensors):
        columns, rows, strides = tensors[0].numel(), 1, (0,) * len(tensors)
    else:
        columns = tensors[0].shape[-1]
        rows = tensors[0].numel() // columns
        tensors, strides = zip(*(as_rows(x) for x in tensors), strict=True)
    blocks = cdiv(columns, block)
    return tensors, (columns, *strides), (rows * blocks, 1, 1), blocks


def adjacent(x: Tensor) -> Tensor:
    """`x` with adjacent elements of the last dimension, copied if they are not."""
    return x if x.stride(-1) == 1 else x.contiguous()


def are_given(*tensors: Tensor | None) -> tuple[bool, ...]:
    """Which of the tensors are not None: constants of a kernel that has arguments which may be missing."""
    return tuple([x is not None for x in tensors])


def zero(*tensors: Tensor | None) -> None:
    """Fill those of the tensors that are not None with zeros."""
    for x in tensors:
        if x is not None:
            x.zero_()


def copy_or_zero(out: Tensor | None, source: Tensor | None) -> None:
    """Fill `out`, unless it is None, with `source`, or with zeros without one."""
    if out is not None:
        out.zero_() if source is None else out.copy_(source)
