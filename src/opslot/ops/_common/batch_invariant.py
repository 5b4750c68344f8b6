"""A matmul whose rows do not depend on each other: bit for bit the same in every batch.

cuBLAS selects a kernel by the number of rows, and kernels of other tiles or with split K round differently. Here tiles
and the order of the sum over K depend on dtype and device alone.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from opslot._base.jit import dot_of_block, downcast
from opslot._base.kernel_launch import KernelLauncher, cdiv, compute_capability

# By bytes of an element: rows, columns, K per step, warps.
_TILES = {2: (128, 128, 64, 8), 4: (64, 64, 32, 4)}
# Triton's interpreter takes time for each tile.
_INTERPRETED_TILE = (64, 64, 64, 4)


@triton.jit(do_not_specialize=["rows", "columns", "inner"])
def _linear_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    x_stride,
    weight_stride,
    out_stride,
    rows,
    columns,
    inner,
    BIASED: tl.constexpr,
    ADD: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """out [rows, columns] = x [rows, inner] weight[columns, inner]^T + bias; columns of x and out are adjacent.

    With ADD it is added to `out`. Columns of the weight are adjacent, or its rows if TRANSPOSED.
    """
    row_tiles, column_tiles = tl.cdiv(rows, BM), tl.cdiv(columns, BN)
    # Groups of GROUP row tiles share weights in the L2 cache.
    tile = tl.program_id(0)
    group = tile // (GROUP * column_tiles)
    height = tl.minimum(row_tiles - group * GROUP, GROUP)
    inside = tile - group * GROUP * column_tiles
    row = (group * GROUP + inside % height).to(tl.int64) * BM + tl.arange(0, BM)
    column = (inside // height).to(tl.int64) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    x = x_ptr + row[:, None] * x_stride + k[None, :]
    if TRANSPOSED:
        weight = weight_ptr + column[None, :] + k[:, None].to(tl.int64) * weight_stride
    else:
        weight = weight_ptr + column[None, :] * weight_stride + k[:, None]
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, inner, BK):
        left = inner - start
        a = tl.load(x, mask=(row < rows)[:, None] & (k < left)[None, :], other=0.0)
        b = tl.load(weight, mask=(k < left)[:, None] & (column < columns)[None, :], other=0.0)
        total = dot_of_block(a, b, total)
        x += BK
        if TRANSPOSED:
            weight += tl.cast(BK, tl.int64) * weight_stride
        else:
            weight += BK
    if BIASED:
        total += tl.load(bias_ptr + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    out = out_ptr + row[:, None] * out_stride + column[None, :]
    stored = (row < rows)[:, None] & (column < columns)[None, :]
    if ADD:
        total += tl.load(out, mask=stored, other=0.0).to(tl.float32)
    tl.store(out, downcast(total, out_ptr.dtype.element_ty), mask=stored)


_launch = KernelLauncher(_linear_kernel)


def linear_into(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None, add: bool = False) -> None:
    """out [N, V] = x [N, K] weight^T [V, K] + bias [V], accumulated in float32; `weight` may have any strides.

    Args:
        add: add it to `out`.
    """
    rows, inner = x.shape
    columns = weight.shape[0]
    if not rows or not columns:
        return
    if x.stride(1) != 1 and inner != 1:
        x = x.contiguous()
    if 1 not in weight.stride():
        weight = weight.contiguous()
    transposed = weight.stride(1) != 1
    bm, bn, bk, warps = _TILES[x.element_size()] if compute_capability(x.device) else _INTERPRETED_TILE
    _launch(
        (cdiv(rows, bm) * cdiv(columns, bn), 1, 1),
        (x, weight, None if bias is None else bias.contiguous(), out),
        (x.stride(0), weight.stride(1 if transposed else 0), out.stride(0)),
        (rows, columns, inner),
        (bias is not None, add, transposed, bm, bn, bk, 8),
        warps,
    )
