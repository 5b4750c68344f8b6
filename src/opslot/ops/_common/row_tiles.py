"""Tilings of Triton kernels that reduce over rows, and the sum of what their programs accumulated for the weights."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from opslot._base.kernel_launch import KernelLauncher, cdiv
from opslot.ops._common.arguments import as_rows


@dataclass(frozen=True)
class RowTiling:
    """Tile and grid of one launch: `rows` x `columns` elements, and for a persistent grid CTAs per SM."""

    rows: int
    columns: int
    warps: int
    programs: int = 0
    stages: int = 1

    @property
    def tile(self) -> tuple[int, int]:
        return self.rows, self.columns


@functools.cache
def forward_plan(width: int) -> RowTiling:
    """Forward: tiles of 2048 elements, more for longer rows, at 32 elements a thread."""
    columns = triton.next_power_of_2(width)
    rows = max(1, 2048 // columns)
    return RowTiling(rows, columns, warps=min(32, max(2 if rows == 1 else 4, rows * columns // 1024)))


@functools.cache
def backward_plan(width: int, element_bytes: int) -> RowTiling:
    """Backward: CTAs that load up to two tiles ahead, with tiles of 8192 elements on an SM.

    Their number was chosen on an H200, where eight take 1.5 times as long as two for rows of 128 elements, and 0.7 of
    their time for 256.

    Args:
        element_bytes: summed over the tensors that a tile is loaded from. Tiles in flight on an SM stay within 128 KiB
            of shared memory.
    """
    programs = 2 if width <= 128 or width > 2048 else 8 if width <= 512 else 4
    columns = triton.next_power_of_2(width)
    rows = max(1, 8192 // programs // columns)
    stages = min(3, max(1, 2**17 // (programs * rows * columns * element_bytes)))
    warps = min(32, max(16 // programs, rows * columns // 512))
    return RowTiling(rows, columns, warps=warps, programs=programs, stages=stages)


def aligned_rows(x: Tensor) -> tuple[Tensor, int]:
    """`as_rows`, copied unless pointer and stride are aligned as those of contiguous rows.

    The alignment determines Triton's tile layout, and so the order of the sum over a row. Without the copy, a single
    row could differ in the last bit from the same row in a batch.
    """
    rows, stride = as_rows(x)
    width = rows.shape[-1]
    fits = stride == width if width & 15 else not (stride | rows.data_ptr()) & 15
    return (rows, stride) if fits else (rows.clone(memory_format=torch.contiguous_format), width)


@triton.jit(do_not_specialize=["count"])
def _sum_partials_kernel(
    partial_ptr, out_ptr, second_ptr, count, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    partial_ptr += tl.program_id(1).to(tl.int64) * count * WIDTH
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, count, ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row < count)[:, None] & (column < WIDTH)[None, :]
        total += tl.load(partial_ptr + row[:, None] * WIDTH + column[None, :], mask=mask, other=0.0)
    summed = tl.sum(total, axis=0)
    if tl.program_id(1) == 0:
        tl.store(out_ptr + column, summed.to(out_ptr.dtype.element_ty), mask=column < WIDTH)
    else:
        tl.store(second_ptr + column, summed.to(second_ptr.dtype.element_ty), mask=column < WIDTH)


_launch_sum_partials = KernelLauncher(_sum_partials_kernel)


def sum_partials(partial: Tensor, *outs: Tensor) -> None:
    """Write the sums of `partial` [len(outs), programs, width] over programs, in a fixed order, to 1 or 2 `outs`."""
    programs, width = partial.shape[-2:]
    _launch_sum_partials(
        (cdiv(width, 8), len(outs), 1), (partial, outs[0], outs[-1]), (), (programs,), (width, 256, 8), 4
    )
