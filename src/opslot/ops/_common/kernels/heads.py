"""Triton kernel that copies heads of up to three tensors, such as q, k and v, in one launch: padded, cut or stacked.

Strides are passed in units of UNIT elements, a constexpr that divides all of them, since Triton would load 2 bytes at a
time for a stride that is not a multiple of 16, as with heads of 72 channels.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from opslot._base.kernel_launch import KernelLauncher, cdiv

# Tensors of a launch.
MOST = tl.constexpr(3)
# Elements of a tile.
_TILE = 4096


_SCALARS = [f"{stride}_stride_{i}" for i in range(MOST.value) for stride in ("batch", "token", "head")]


@triton.jit(do_not_specialize=[*_SCALARS, "batch_tokens", "tokens"])
def _copy_kernel(
    source_0,
    target_0,
    source_1,
    target_1,
    source_2,
    target_2,
    batch_stride_0,
    token_stride_0,
    head_stride_0,
    batch_stride_1,
    token_stride_1,
    head_stride_1,
    batch_stride_2,
    token_stride_2,
    head_stride_2,
    batch_tokens,
    tokens,
    HEADS_0: tl.constexpr,
    COPIED_0: tl.constexpr,
    NEW_WIDTH_0: tl.constexpr,
    HEADS_1: tl.constexpr,
    COPIED_1: tl.constexpr,
    NEW_WIDTH_1: tl.constexpr,
    HEADS_2: tl.constexpr,
    COPIED_2: tl.constexpr,
    NEW_WIDTH_2: tl.constexpr,
    TOTAL: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The second coordinate of a program selects the tensor.

    A target has TOTAL heads from one token to the next, or with 0 its own.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    sources, targets = (source_0, source_1, source_2), (target_0, target_1, target_2)
    batch_strides = (batch_stride_0, batch_stride_1, batch_stride_2)
    token_strides = (token_stride_0, token_stride_1, token_stride_2)
    head_strides = (head_stride_0, head_stride_1, head_stride_2)
    all_heads, copied = (HEADS_0, HEADS_1, HEADS_2), (COPIED_0, COPIED_1, COPIED_2)
    new_widths = (NEW_WIDTH_0, NEW_WIDTH_1, NEW_WIDTH_2)
    # All branches are compiled: Triton 3.6 has no constants in tuples.
    for i in tl.static_range(MOST):
        if tl.program_id(1) == i:
            heads, width = all_heads[i], new_widths[i]
            token, head = row // heads, row % heads
            batch, position = token // batch_tokens, token % batch_tokens
            start = batch * batch_strides[i] + position * token_strides[i] + head * head_strides[i]
            inside = (token < tokens)[:, None]
            source = sources[i] + (start * UNIT)[:, None] + column
            x = tl.load(source, mask=inside & (column < copied[i]), other=0.0)
            target = targets[i] + ((token * (TOTAL if TOTAL > 0 else heads) + head) * width)[:, None] + column
            tl.store(target, x, mask=inside & (column < width))


_launch = KernelLauncher(_copy_kernel)


@functools.lru_cache(maxsize=1024)
def _arguments(
    shapes: tuple[tuple[int, ...], ...], strides: tuple[tuple[int, ...], ...], widths: tuple[int, ...], total: int
) -> tuple[tuple[int, int, int], tuple[int, ...], tuple[Any, ...]]:
    """Grid, scalars and constants of a launch for tensors [B, S, heads, D] of one B and S."""
    batch, batch_tokens = shapes[0][:2]
    unit = math.gcd(16, *(stride for each in strides for stride in each[:3]))
    columns = triton.next_power_of_2(max(widths))
    rows = max(1, _TILE // columns)
    blocks = max(cdiv(batch * batch_tokens * shape[2], rows) for shape in shapes)
    # In place of absent tensors, which no program selects.
    absent = MOST.value - len(shapes)
    scalars = [stride // unit for each in strides for stride in each[:3]] + [0] * (3 * absent)
    sizes = [
        size for shape, width in zip(shapes, widths, strict=True) for size in (shape[2], min(shape[3], width), width)
    ]
    return (
        (blocks, len(shapes), 1),
        (*scalars, batch_tokens, batch * batch_tokens),
        (*sizes, *[1] * (3 * absent), total, unit, rows, columns),
    )


def _copy_heads(sources: Sequence[Tensor], targets: Sequence[Tensor], total: int) -> None:
    grid, scalars, constants = _arguments(
        tuple([x.shape for x in sources]),
        tuple([x.stride() for x in sources]),
        tuple([x.shape[3] for x in targets]),
        total,
    )
    pointers = [x for pair in zip(sources, targets, strict=True) for x in pair]
    # Absent tensors are not read.
    pointers += pointers[:2] * (MOST.value - len(sources))
    _launch(grid, tuple(pointers), (), scalars, constants, 4)


def _four_dimensions(x: Tensor) -> Tensor:
    """[B, S, heads, D] of that, or of [S, heads, D], with adjacent channels; heads and tokens may have any strides."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x if x.dim() == 4 else x[None]


def resize_heads(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Copy tensors [B, S, heads, D] or [S, heads, D] of any strides to contiguous ones of other D, cut or zero-padded.

    In one launch if there are at most three, of one B and S.
    """
    sources, targets = ([_four_dimensions(x) for x in tensors] for tensors in (sources, targets))
    together = len(sources) <= MOST.value and {x.shape[:2] for x in sources} == {sources[0].shape[:2]}
    for at in (slice(None),) if together else (slice(i, i + 1) for i in range(len(sources))):
        if sources[at][0].numel():
            _copy_heads(sources[at], targets[at], 0)


def stack_heads(sources: Sequence[Tensor], target: Tensor) -> None:
    """Copy three tensors [B, S, heads, D] or [S, heads, D] of any strides, side by side, to a contiguous one."""
    if target.numel():
        parts = target.split([x.shape[-2] for x in sources], -2)
        _copy_heads([_four_dimensions(x) for x in sources], [_four_dimensions(x) for x in parts], target.shape[-2])
