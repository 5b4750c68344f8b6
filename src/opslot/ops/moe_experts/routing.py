"""Where each chosen expert's input row goes: a stable counting sort on the GPU, without a synchronization.

A slot is one choice of one token, numbered token * K + choice. Slots become rows in order of expert, then of slot. An
expert's rows start at a multiple of `align`, so that a tile of rows never holds two experts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 128


class Routing(NamedTuple):
    """Rows of all experts; R is an upper bound that depends on shapes alone.

    Attributes:
        places: [S] int32, the row of each slot; -1 for an expert held elsewhere.
        slots: [R] int32, the slot of each row; -1 for rows that hold none.
        starts: [E + 1] int32, first row of each expert and the end of the last one, multiples of the alignment.
        counts: [E] int32, rows of each expert that hold a slot.
        tile_expert: [R / align] int32, the expert that each `align` rows belong to.
    """

    places: Tensor
    slots: Tensor
    starts: Tensor
    counts: Tensor
    tile_expert: Tensor


def row_bound(slots: int, experts: int, align: int) -> int:
    """R: at most min(E, S) experts have rows, and each may leave align - 1 of its last tile empty."""
    return (slots + min(experts, slots) * (align - 1)) // align * align


def empty_routing(top_k_index: Tensor, experts: int, align: int) -> Routing:
    """A `Routing` whose tensors are not filled in yet."""
    slots = top_k_index.numel()
    rows = row_bound(slots, experts, align)
    sizes = (slots, rows, experts + 1, experts, rows // align)
    return Routing(*(top_k_index.new_empty(size, dtype=torch.int32) for size in sizes))


def route(top_k_index: Tensor, experts: int, align: int) -> Routing:
    """Sort the slots of `top_k_index` [T, K] (integer, contiguous) by expert; an index outside 0..E-1 gets no row."""
    routing = empty_routing(top_k_index, experts, align)
    slots = top_k_index.numel()
    blocks = triton.cdiv(slots, _BLOCK)
    width = triton.next_power_of_2(experts + 1)
    before = top_k_index.new_empty((blocks, experts), dtype=torch.int32)
    if blocks:
        _count_kernel[(blocks,)](top_k_index, before, slots, experts, WIDTH=width, BLOCK=_BLOCK, num_warps=4)
    _scan_kernel[(experts,)](before, routing.counts, blocks, experts, BLOCK=1024, num_warps=4)
    _scatter_kernel[(max(blocks, 1),)](
        top_k_index,
        before,
        routing.counts,
        routing.starts,
        routing.places,
        routing.slots,
        routing.tile_expert,
        slots,
        experts,
        routing.slots.numel(),
        ALIGN=align,
        WIDTH=width,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return routing


@triton.jit
def _count_kernel(index, before, slots, experts, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Slots of each expert within one block of slots."""
    block = tl.program_id(0)
    slot = block * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(index + slot, mask=slot < slots, other=-1).to(tl.int32)
    expert = tl.where((expert >= 0) & (expert < experts), expert, experts)
    counts = tl.histogram(expert, WIDTH)
    column = tl.arange(0, WIDTH)
    tl.store(before + block * experts + column, counts, mask=column < experts)


@triton.jit
def _scan_kernel(before, counts, blocks, experts, BLOCK: tl.constexpr):
    """For one expert, how many of its slots lie in earlier blocks (in place of each block's count), and its total."""
    expert = tl.program_id(0)
    total = tl.zeros((), tl.int32)
    for start in range(0, blocks, BLOCK):
        block = start + tl.arange(0, BLOCK)
        found = tl.load(before + block * experts + expert, mask=block < blocks, other=0)
        tl.store(before + block * experts + expert, total + tl.cumsum(found, 0) - found, mask=block < blocks)
        total += tl.sum(found, 0)
    tl.store(counts + expert, total)


@triton.jit
def _scatter_kernel(
    index,
    before,
    counts,
    starts,
    places,
    row_slots,
    tile_expert,
    slots,
    experts,
    rows,
    ALIGN: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Give one block of slots its rows; programs share out the experts' last tiles and the map from tile to expert."""
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    column = tl.arange(0, WIDTH)
    count = tl.load(counts + column, mask=column < experts, other=0)
    size = (count + ALIGN - 1) // ALIGN * ALIGN
    end = tl.cumsum(size, 0)
    start = end - size

    slot = program * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(index + slot, mask=slot < slots, other=-1).to(tl.int32)
    mine = (expert >= 0) & (expert < experts)
    same = (expert[:, None] == expert[None, :]) & (tl.arange(0, BLOCK)[None, :] < tl.arange(0, BLOCK)[:, None])
    rank = tl.sum(same.to(tl.int32), 1)
    safe = tl.where(mine, expert, 0)
    first = tl.gather(start, safe, 0)
    place = first + tl.load(before + program * experts + safe, mask=mine, other=0) + rank
    tl.store(places + slot, tl.where(mine, place, -1), mask=slot < slots)
    tl.store(row_slots + place, slot, mask=mine)

    if program == 0:
        tl.store(starts + column, start, mask=column <= experts)
    for tile in range(program, rows // ALIGN, programs):
        owner = tl.sum((end <= tile * ALIGN).to(tl.int32), 0)
        tl.store(tile_expert + tile, tl.minimum(owner, experts - 1))
    filler = tl.arange(0, ALIGN)
    for other in range(program, experts, programs):
        used = tl.load(counts + other)
        last = tl.sum(tl.where(column == other, end, 0), 0)
        free = (used + ALIGN - 1) // ALIGN * ALIGN - used
        tl.store(row_slots + last - free + filler, tl.full((ALIGN,), -1, tl.int32), mask=filler < free)
    for row in range(tl.max(end, 0) + program * BLOCK, rows, programs * BLOCK):
        free_rows = row + tl.arange(0, BLOCK)
        tl.store(row_slots + free_rows, tl.full((BLOCK,), -1, tl.int32), mask=free_rows < rows)
