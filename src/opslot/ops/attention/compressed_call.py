"""Tiles of the kernels of `compressed.py`, and what their launches have in common."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import triton
from torch import Tensor

from opslot._base.kernel_launch import cdiv, compute_capability
from opslot.ops._common.arguments import adjacent
from opslot.ops._common.specs import H200
from opslot.ops.attention.kernels.compressed_forward import ALL, COUNTS, INDICES
from opslot.ops.attention.kernels.intervals import interval_strides, intervals
from opslot.ops.attention.triton import Tile, TilePlan

LOG2E = math.log2(math.e)


# By element size; rows are query heads of one token, for the gradient of keys those of several. These fit into 99 KiB
# of shared memory, that of the smallest supported GPUs, at the widest head.
PLANS = {
    2: TilePlan(Tile(16, 32, 4, 2), Tile(16, 16, 4, 2), (Tile(16, 32, 4, 1),)),
    4: TilePlan(Tile(16, 16, 4, 1), Tile(16, 16, 4, 1), (Tile(16, 16, 4, 1),)),
}
H200_PLANS = PLANS | {2: TilePlan(Tile(64, 64, 8, 2), Tile(64, 32, 8, 2), (Tile(32, 64, 8, 2),))}


def plan(element_bytes: int, capability: tuple[int, int] | None) -> TilePlan:
    return (H200_PLANS if capability == H200 else PLANS)[element_bytes]


class CompressedInputs(NamedTuple):
    """The arguments of the op; see `compressed.py`."""

    q: Tensor
    kv: Tensor
    sinks: Tensor | None
    selected: Tensor | None
    real: Tensor | None
    cu_seqlens: Tensor | None
    compressed: int
    scale: float
    window: int | None

    def adjacent(self) -> CompressedInputs:
        """With adjacent channels of q and kv."""
        return self._replace(q=adjacent(self.q), kv=adjacent(self.kv))


class CompressedCall:
    """What the kernels' launches have in common."""

    def __init__(self, inputs: CompressedInputs) -> None:
        q, kv, _, selected, real, cu_seqlens, compressed, _, window = inputs
        self.batch, self.queries, self.heads, self.width = q.shape
        self.window_keys, self.compressed = kv.shape[1] - compressed, compressed
        self.empty = 0 in q.shape
        if selected is not None and 0 in selected.shape[2:]:
            # Counts, since a block of indices would be empty.
            selected = selected.new_zeros(selected.shape[:2])
        self.plan = plan(q.element_size(), compute_capability(q.device))
        self.selected = None if selected is None else selected.contiguous()
        self.kind = ALL if selected is None else COUNTS if selected.dim() == 2 else INDICES
        self.places = selected.shape[2] if selected is not None and selected.dim() == 3 else 1
        self.real = None if real is None else real.contiguous()
        self.strides = (*q.stride()[:3], *kv.stride()[:2])
        unit = 1 if functools.reduce(lambda a, b: a | b, self.strides) % 8 else 8
        self.widths = (self.width, max(16, triton.next_power_of_2(self.width)), unit)
        self.intervals = intervals(q, kv[:, : self.window_keys, None], cu_seqlens, None, True, window)

    @property
    def seen(self) -> tuple[Tensor, Tensor, Tensor]:
        """What kernels over queries read to know the keys that each query sees."""
        return self.intervals, pointer(self.selected, self.intervals), pointer(self.real, self.intervals)

    def rows(self, tile: Tile) -> int:
        return min(tile.rows, max(16, triton.next_power_of_2(self.heads)))

    def selected_strides(self, selected: Tensor | None) -> tuple[int, int]:
        return (0, 0) if selected is None else (selected.stride(0), selected.stride(1))

    def real_stride(self) -> int:
        return 0 if self.real is None else self.real.stride(0)

    def by_token(self, tile: Tile) -> tuple[tuple[int, int, int], tuple[int, ...], tuple[Any, ...]]:
        """Grid, strides and constants of the kernels over queries."""
        rows = self.rows(tile)
        grid = (self.queries * cdiv(self.heads, rows), self.batch, 1)
        strides = (
            *self.strides,
            *interval_strides(self.intervals),
            *self.selected_strides(self.selected),
            self.real_stride(),
        )
        places = triton.next_power_of_2(self.places)
        constants = (self.kind, places, self.real is not None, *self.widths, rows, tile.keys, tile.stages)
        return grid, strides, constants

    def sizes(self) -> tuple[int, int, int, int, int]:
        return self.heads, self.queries, self.window_keys, self.compressed, self.places


def pointer(x: Tensor | None, other: Tensor) -> Tensor:
    """What a kernel gets for a tensor that it does not read where there is none, since it does arithmetic with it."""
    return other if x is None else x
