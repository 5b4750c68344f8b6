"""Triton kernels that round a matrix to FP8 with one scale."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from opslot._base.kernel_launch import KernelLauncher, cdiv

_BLOCK = 4096
# Programs that find the largest element; their results are reduced again in each program that rounds.
_PROGRAMS = 1024
_TILE = 128


def quantize(
    x: Tensor, rows: Tensor | None, columns: Tensor | None, scale: Tensor, largest: float, most: float
) -> None:
    """Write x in FP8, transposed into `columns`, and the scale that undoes the scaling.

    Args:
        x: [T, K], contiguous, of 16 bits.
        rows: [T, K], columns: [K, T padded], of an FP8 dtype, contiguous.
        scale: float32 [].
        largest: finite number of the FP8 dtype.
        most: limit of the factor of `x`.
    """
    length, width = x.shape
    count = x.numel()
    steps = cdiv(count, _PROGRAMS * _BLOCK)
    programs = cdiv(count, steps * _BLOCK)
    partial = torch.empty(programs, dtype=torch.float32, device=x.device)
    _largest_launcher((programs, 1, 1), (x, partial), (), (count, steps), (_BLOCK,), 4)
    padded = columns.shape[1] if columns is not None else length
    _round_launcher(
        (cdiv(padded, _TILE), cdiv(width, _TILE), 1),
        (x, partial, rows, columns, scale),
        (width, padded),
        (length, programs, largest, most),
        (triton.next_power_of_2(programs), rows is not None, columns is not None, _TILE),
        8,
    )


@triton.jit(do_not_specialize=["count", "steps"])
def _largest_kernel(x, partial, count, steps, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    largest = tl.zeros((BLOCK,), tl.float32)
    for step in range(steps):
        at = (program * steps + step).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, tl.abs(tl.load(x + at, mask=at < count, other=0.0).to(tl.float32)))
    tl.store(partial + program, tl.max(largest, 0))


@triton.jit(do_not_specialize=["length", "programs", "largest", "most"])
def _round_kernel(
    x,
    partial,
    rows,
    columns,
    scale,
    width,
    padded,
    length,
    programs,
    largest,
    most,
    PARTIALS: tl.constexpr,
    BY_ROW: tl.constexpr,
    BY_COLUMN: tl.constexpr,
    TILE: tl.constexpr,
):
    each = tl.arange(0, PARTIALS)
    amax = tl.max(tl.load(partial + each, mask=each < programs, other=0.0), 0)
    factor = tl.where(amax > 0, tl.minimum(largest / amax, most), 1.0)
    t = tl.program_id(0) * TILE + tl.arange(0, TILE)
    k = tl.program_id(1) * TILE + tl.arange(0, TILE)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(scale, 1.0 / factor)
    inside = (t < length)[:, None] & (k < width)[None, :]
    at = t.to(tl.int64)[:, None] * width + k[None, :]
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * factor
    if BY_ROW:
        tl.store(rows + at, value.to(rows.dtype.element_ty), mask=inside)
    if BY_COLUMN:
        to = k.to(tl.int64)[:, None] * padded + t[None, :]
        turned = tl.trans(value.to(columns.dtype.element_ty))
        tl.store(columns + to, turned, mask=(k < width)[:, None] & (t < padded)[None, :])


_largest_launcher = KernelLauncher(_largest_kernel)
_round_launcher = KernelLauncher(_round_kernel)
