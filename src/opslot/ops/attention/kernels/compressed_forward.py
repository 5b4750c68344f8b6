"""Forward of attention to a window and to compressed keys, in Triton.

All heads share one key/value head, whose keys are the values too, so a tile of keys is loaded once for both matmuls.
Rows of a tile are the heads of one query: which compressed keys a query sees differs from token to token. Each program
reads the keys of its query's window, then the compressed ones, by their indices.

Logits are in base 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from opslot._base.jit import dot, downcast
from opslot._base.kernel_launch import KernelLauncher

# How the compressed keys that a query sees are given: all, the number of the first ones, or their indices.
ALL, COUNTS, INDICES = 0, 1, 2
_COUNTS, _INDICES = tl.constexpr(COUNTS), tl.constexpr(INDICES)


@triton.jit
def compressed_limit(selected_ptr, places, compressed, SELECTED: tl.constexpr, PLACES: tl.constexpr):
    """How many places of a query's list of compressed keys to read; the last one holds a key."""
    if SELECTED == _INDICES:
        place = tl.arange(0, PLACES)
        entry = tl.load(selected_ptr + place, mask=place < places, other=-1)
        limit = tl.max(tl.where(entry >= 0, place + 1, 0), 0)
    elif SELECTED == _COUNTS:
        limit = tl.minimum(tl.load(selected_ptr).to(tl.int32), compressed)
    else:
        limit = compressed
    return limit


@triton.jit
def block_of_keys(
    i,
    window_blocks,
    start,
    end,
    limit,
    window_keys,
    selected_ptr,
    real_ptr,
    SELECTED: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The keys of block `i` of a query, and which of them it sees: first those of its window, then compressed ones."""
    position = i * BLOCK_N + tl.arange(0, BLOCK_N)
    key = start + position
    place = position - window_blocks * BLOCK_N
    in_window = (key < end) & (place < 0)
    listed = (place >= 0) & (place < limit)
    if PADDED:
        in_window = in_window & (tl.load(real_ptr + key, mask=in_window, other=0) != 0)
    entry = place
    if SELECTED == _INDICES:
        entry = tl.load(selected_ptr + place, mask=listed, other=-1).to(tl.int32)
        listed = listed & (entry >= 0)
    return tl.where(place < 0, key, window_keys + entry), in_window | listed


@triton.jit
def load_rows(pointers, valid, WIDTH: tl.constexpr, D: tl.constexpr):
    """Rows that begin at `pointers`; zeros in those that are not `valid`."""
    column = tl.arange(0, D)
    mask = valid[:, None]
    if D != WIDTH:
        mask = mask & (column < WIDTH)[None, :]
    return tl.load(pointers[:, None] + column[None, :], mask=mask, other=0.0)


@triton.jit
def store_rows(ptr, offsets, valid, x, WIDTH: tl.constexpr, D: tl.constexpr):
    column = tl.arange(0, D)
    mask = valid[:, None] & (column < WIDTH)[None, :]
    tl.store(ptr + offsets[:, None] + column[None, :], downcast(x, ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["heads", "queries", "window_keys", "compressed", "places"])
def _forward_kernel(
    q_ptr,
    kv_ptr,
    sinks_ptr,
    intervals_ptr,
    selected_ptr,
    real_ptr,
    out_ptr,
    lse_ptr,
    q_batch_stride,
    q_token_stride,
    q_head_stride,
    kv_batch_stride,
    kv_token_stride,
    interval_stride,
    interval_size,
    selected_batch_stride,
    selected_token_stride,
    real_stride,
    heads,
    queries,
    window_keys,
    compressed,
    places,
    scale,
    HAS_SINKS: tl.constexpr,
    SELECTED: tl.constexpr,
    PLACES: tl.constexpr,
    PADDED: tl.constexpr,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    head_blocks = tl.cdiv(heads, BLOCK_M)
    head = tl.program_id(0) % head_blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    token = tl.program_id(0) // head_blocks
    b = tl.program_id(1).to(tl.int64)
    valid = head < heads
    q_ptr += b * (q_batch_stride // UNIT * UNIT) + token.to(tl.int64) * (q_token_stride // UNIT * UNIT)
    q = load_rows(q_ptr + head * (q_head_stride // UNIT * UNIT), valid, WIDTH, D)
    kv_ptr += b * (kv_batch_stride // UNIT * UNIT)
    kv_token_stride = kv_token_stride // UNIT * UNIT
    start = tl.load(intervals_ptr + b * interval_stride + token)
    end = tl.load(intervals_ptr + interval_size + b * interval_stride + token)
    selected_ptr += b * selected_batch_stride + token.to(tl.int64) * selected_token_stride
    real_ptr += b * real_stride
    limit = compressed_limit(selected_ptr, places, compressed, SELECTED, PLACES)
    window_blocks = tl.cdiv(end - start, BLOCK_N)
    blocks = window_blocks + tl.cdiv(limit, BLOCK_N)

    if HAS_SINKS:
        top = tl.load(sinks_ptr + head, mask=valid, other=0.0).to(tl.float32) * 1.4426950408889634
        total = tl.full((BLOCK_M,), 1.0, dtype=tl.float32)
    else:
        # Finite, so that rows without a visible key stay finite.
        top = tl.full((BLOCK_M,), -1e30, dtype=tl.float32)
        total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    acc = tl.zeros((BLOCK_M, D), dtype=tl.float32)
    for i in tl.range(0, blocks, num_stages=STAGES):
        key, visible = block_of_keys(
            i, window_blocks, start, end, limit, window_keys, selected_ptr, real_ptr, SELECTED, PADDED, BLOCK_N
        )
        kv = load_rows(kv_ptr + key * kv_token_stride, visible, WIDTH, D)
        scores = dot(q, tl.trans(kv), tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32))
        scores = tl.where(visible[None, :], scores * scale, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        decay = tl.exp2(top - new_top)
        total = total * decay + tl.sum(weights, 1)
        acc = dot(downcast(weights, kv.dtype), kv, acc * decay[:, None])
        top = new_top

    row = (b * queries + token) * heads
    found = total > 0
    total = tl.where(found, total, 1.0)
    store_rows(out_ptr + row * WIDTH, head * WIDTH, valid, acc / total[:, None], WIDTH, D)
    tl.store(lse_ptr + row + head, tl.where(found, top + tl.log2(total), float("inf")), mask=valid)


launch_forward = KernelLauncher(_forward_kernel)
