"""L2 normalization of queries and keys, and its backward, which also sums over each group of value heads."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from opslot._base.jit import downcast
from opslot.ops._common.triton import KernelLauncher, cdiv


@triton.jit(do_not_specialize=["rows"])
def normalize_kernel(
    x_ptr,
    out_ptr,
    token_stride,
    head_stride,
    rows,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each row of [T, HEADS, WIDTH] divided by its norm."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (column < WIDTH)[None, :]
    offset = (row // HEADS).to(tl.int64) * token_stride + (row % HEADS) * head_stride
    x = tl.load(x_ptr + offset[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
    x *= tl.rsqrt(tl.sum(x * x, 1) + 1e-6)[:, None]
    tl.store(out_ptr + row.to(tl.int64)[:, None] * WIDTH + column[None, :], downcast(x, out_ptr.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["rows"])
def fold_kernel(
    x_ptr,
    grads_ptr,
    dx_ptr,
    token_stride,
    head_stride,
    rows,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    NORM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The sum of [T, HEADS, GROUP, WIDTH] over a group of value heads, [T, HEADS, WIDTH], and back through the norm."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (column < WIDTH)[None, :]
    base = row.to(tl.int64)[:, None] * WIDTH
    total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for i in tl.static_range(GROUP):
        total += tl.load(grads_ptr + base * GROUP + i * WIDTH + column[None, :], mask=mask, other=0.0).to(tl.float32)
    if NORM:
        offset = (row // HEADS).to(tl.int64) * token_stride + (row % HEADS) * head_stride
        x = tl.load(x_ptr + offset[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
        inverse_norm = tl.rsqrt(tl.sum(x * x, 1) + 1e-6)[:, None]
        x *= inverse_norm
        total = inverse_norm * (total - x * tl.sum(x * total, 1)[:, None])
    tl.store(dx_ptr + base + column[None, :], downcast(total, dx_ptr.dtype.element_ty), mask=mask)


_launch_normalize = KernelLauncher(normalize_kernel)
_launch_fold = KernelLauncher(fold_kernel)


def _program_shape(width: int) -> tuple[int, int]:
    """Rows and columns of a program of either kernel: 16 elements a thread of four warps."""
    columns = triton.next_power_of_2(width)
    return max(1, 2048 // columns), columns


def normalized(x: Tensor) -> Tensor:
    """[T, heads, width] with each head's row divided by its norm."""
    tokens, heads, width = x.shape
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    rows, columns = _program_shape(width)
    grid = (cdiv(tokens * heads, rows), 1, 1)
    _launch_normalize(grid, (x, out), x.stride()[:2], (tokens * heads,), (heads, width, rows, columns), 4)
    return out


def fold(raw: Tensor, of_value_heads: Tensor, dx: Tensor, group: int, normalize: bool) -> None:
    """Fill `dx`, the gradient of `raw` [T, heads, width], from that of each value head [T, heads * group, width]."""
    tokens, heads, width = raw.shape
    rows, columns = _program_shape(width)
    _launch_fold(
        (cdiv(tokens * heads, rows), 1, 1),
        (raw, of_value_heads, dx),
        raw.stride()[:2],
        (tokens * heads,),
        (heads, group, width, normalize, rows, columns),
        4,
    )
