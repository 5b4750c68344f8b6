"""Matrices whose width is not a multiple of 16 bytes, kept in memory with zeros up to the next multiple.

cuBLAS's fast kernels take sizes that are multiples of 16 bytes alone. A tensor of another width is a view of the first
columns of such memory, and kernels that follow each other pass it on: `mark_padded` says that the rest of it is zero.
"""

from __future__ import annotations

import operator
from itertools import accumulate

import torch
from torch import Tensor

_BYTES = 16
# The attribute of a marked tensor.
_MARK = "zero_padding"


def padded_width(width: int, dtype: torch.dtype) -> int:
    """The smallest width of at least `width` elements that is a multiple of 16 bytes."""
    multiple = _BYTES // dtype.itemsize
    return -(-width // multiple) * multiple


def empty_rows(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """An uninitialized tensor of `shape`, in memory whose rows are multiples of 16 bytes."""
    *rows, width = shape
    padded = padded_width(width, dtype or like.dtype)
    return like.new_empty(*rows, padded, dtype=dtype)[..., :width]


def empty_rows_like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """An uninitialized tensor: of `empty_rows` if `x` may be of it too, else contiguous."""
    dtype = dtype or x.dtype
    if has_padded_rows(x) and dtype.itemsize == x.element_size():
        return empty_rows(x, *x.shape, dtype=dtype)
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def has_padded_rows(x: Tensor) -> bool:
    """Whether the strides of `x` are those of `empty_rows` with padding."""
    if x.dim() < 2 or x.is_contiguous() or x.stride(-1) != 1:
        return False
    width = padded_width(x.shape[-1], x.dtype)
    strides = list(accumulate(x.shape[-2:0:-1], operator.mul, initial=width))
    return width > x.shape[-1] and list(x.stride()[-2::-1]) == strides


def zero_padding(x: Tensor) -> None:
    """Fill the padding of `x`, of `empty_rows`, with zeros, if it has any."""
    if has_padded_rows(x):
        _memory(x)[:, x.shape[-1] :] = 0
        mark_padded(x)


def mark_padded(x: Tensor) -> Tensor:
    """Let `with_padding` use the memory of `x`, if it has padding, which must be zero. Returns `x`."""
    if not torch.compiler.is_compiling() and has_padded_rows(x):
        setattr(x, _MARK, True)
    return x


def with_padding(x: Tensor) -> Tensor:
    """x [..., C] as rows [R, C'] with zeros up to a multiple of 16 bytes; a copy unless `x` is marked or needs none."""
    width = padded_width(x.shape[-1], x.dtype)
    if width == x.shape[-1]:
        return x.reshape(-1, width)
    if not torch.compiler.is_compiling() and hasattr(x, _MARK):
        return _memory(x)
    rows = x.new_empty(x.shape[:-1].numel(), width)
    rows[:, : x.shape[-1]] = x.reshape(-1, x.shape[-1])
    rows[:, x.shape[-1] :] = 0
    return rows


def view_without_padding(rows: Tensor, *shape: int) -> Tensor:
    """The tensor of `shape` in rows [R, C'] of `with_padding`, marked."""
    return mark_padded(rows.view(*shape[:-1], rows.shape[1])[..., : shape[-1]])


def _memory(x: Tensor) -> Tensor:
    """The rows of `x` with their padding."""
    width = padded_width(x.shape[-1], x.dtype)
    return x.detach().as_strided((x.shape[:-1].numel(), width), (width, 1))
