"""Sorts token-expert pairs by expert: a stable counting sort on the GPU, without a synchronization.

Pair p = token * K + k is the k-th expert of a token. Each pair gets one row; rows are ordered by expert, then by pair.
The first row of an expert is a multiple of `align`, so that no tile of rows has two experts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 128


class Routing(NamedTuple):
    """The rows of all experts. P is the number of pairs, R an upper bound of the rows that depends on shapes only.

    Attributes:
        pair_to_row: [P] int32, the row of each pair; -1 if another rank holds the expert.
        row_to_pair: [R] int32, the pair of each row; -1 for padding.
        expert_offsets: [E + 1] int32, first row of each expert and the end of the last one, multiples of `align`.
        expert_counts: [E] int32, rows of each expert without padding.
        tile_expert: [R / align] int32, the expert of each tile of `align` rows.
    """

    pair_to_row: Tensor
    row_to_pair: Tensor
    expert_offsets: Tensor
    expert_counts: Tensor
    tile_expert: Tensor


def row_bound(pairs: int, experts: int, align: int) -> int:
    """R: at most min(E, P) experts have rows, each with at most align - 1 rows of padding."""
    return (pairs + min(experts, pairs) * (align - 1)) // align * align


def empty_routing(top_k_index: Tensor, experts: int, align: int) -> Routing:
    """A `Routing` whose tensors are not filled in yet."""
    pairs = top_k_index.numel()
    rows = row_bound(pairs, experts, align)
    sizes = (pairs, rows, experts + 1, experts, rows // align)
    return Routing(*(top_k_index.new_empty(size, dtype=torch.int32) for size in sizes))


def route(top_k_index: Tensor, experts: int, align: int) -> Routing:
    """Sort the pairs of `top_k_index` [T, K] (integer, contiguous) by expert; indices outside 0..E-1 get no row."""
    routing = empty_routing(top_k_index, experts, align)
    pairs = top_k_index.numel()
    blocks = triton.cdiv(pairs, _BLOCK)
    width = triton.next_power_of_2(experts + 1)
    before = top_k_index.new_empty((blocks, experts), dtype=torch.int32)
    if blocks:
        _count_kernel[(blocks,)](top_k_index, before, pairs, experts, WIDTH=width, BLOCK=_BLOCK, num_warps=4)
    _scan_kernel[(experts,)](before, routing.expert_counts, blocks, experts, BLOCK=1024, num_warps=4)
    _scatter_kernel[(max(blocks, 1),)](
        top_k_index,
        before,
        routing.expert_counts,
        routing.expert_offsets,
        routing.pair_to_row,
        routing.row_to_pair,
        routing.tile_expert,
        pairs,
        experts,
        routing.row_to_pair.numel(),
        ALIGN=align,
        WIDTH=width,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return routing


@triton.jit
def _count_kernel(index, before, pairs, experts, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Pairs of each expert in one block of pairs."""
    block = tl.program_id(0)
    pair = block * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(index + pair, mask=pair < pairs, other=-1).to(tl.int32)
    expert = tl.where((expert >= 0) & (expert < experts), expert, experts)
    counts = tl.histogram(expert, WIDTH)
    column = tl.arange(0, WIDTH)
    tl.store(before + block * experts + column, counts, mask=column < experts)


@triton.jit
def _scan_kernel(before, expert_counts, blocks, experts, BLOCK: tl.constexpr):
    """For one expert, replace each block's count by the sum of the earlier blocks', and store the total."""
    expert = tl.program_id(0)
    total = tl.zeros((), tl.int32)
    for start in range(0, blocks, BLOCK):
        block = start + tl.arange(0, BLOCK)
        found = tl.load(before + block * experts + expert, mask=block < blocks, other=0)
        tl.store(before + block * experts + expert, total + tl.cumsum(found, 0) - found, mask=block < blocks)
        total += tl.sum(found, 0)
    tl.store(expert_counts + expert, total)


@triton.jit
def _scatter_kernel(
    index,
    before,
    expert_counts,
    expert_offsets,
    pair_to_row,
    row_to_pair,
    tile_expert,
    pairs,
    experts,
    rows,
    ALIGN: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Assign rows to one block of pairs; programs take turns writing the padding of experts and `tile_expert`."""
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    column = tl.arange(0, WIDTH)
    count = tl.load(expert_counts + column, mask=column < experts, other=0)
    size = (count + ALIGN - 1) // ALIGN * ALIGN
    end = tl.cumsum(size, 0)
    start = end - size

    pair = program * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(index + pair, mask=pair < pairs, other=-1).to(tl.int32)
    mine = (expert >= 0) & (expert < experts)
    same = (expert[:, None] == expert[None, :]) & (tl.arange(0, BLOCK)[None, :] < tl.arange(0, BLOCK)[:, None])
    earlier = tl.sum(same.to(tl.int32), 1)
    safe = tl.where(mine, expert, 0)
    first = tl.gather(start, safe, 0)
    target = first + tl.load(before + program * experts + safe, mask=mine, other=0) + earlier
    tl.store(pair_to_row + pair, tl.where(mine, target, -1), mask=pair < pairs)
    tl.store(row_to_pair + target, pair, mask=mine)

    if program == 0:
        tl.store(expert_offsets + column, start, mask=column <= experts)
    for tile in range(program, rows // ALIGN, programs):
        owner = tl.sum((end <= tile * ALIGN).to(tl.int32), 0)
        tl.store(tile_expert + tile, tl.minimum(owner, experts - 1))
    filler = tl.arange(0, ALIGN)
    for other in range(program, experts, programs):
        used = tl.load(expert_counts + other)
        last = tl.sum(tl.where(column == other, end, 0), 0)
        free = (used + ALIGN - 1) // ALIGN * ALIGN - used
        tl.store(row_to_pair + last - free + filler, tl.full((ALIGN,), -1, tl.int32), mask=filler < free)
    for row in range(tl.max(end, 0) + program * BLOCK, rows, programs * BLOCK):
        free_rows = row + tl.arange(0, BLOCK)
        tl.store(row_to_pair + free_rows, tl.full((BLOCK,), -1, tl.int32), mask=free_rows < rows)
