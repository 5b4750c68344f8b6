"""Backward of attention to a window and to compressed keys, in Triton.

One kernel over queries for dq, like forward, and one over blocks of keys for the gradient of keys, which are the values
too. The second reads all queries that may see a block, and masks those that do not. Where few of many keys are
selected, a kernel over queries writes what each adds to the keys that it selects, and another one sums it by key. No
atomics, so the gradients are deterministic.
"""

from __future__ import annotations

import triton
import triton.language as tl

from opslot._base.jit import dot, downcast
from opslot._base.kernel_launch import KernelLauncher
from opslot.ops.attention.kernels.compressed_forward import (
    COUNTS,
    INDICES,
    block_of_keys,
    compressed_limit,
    load_rows,
    store_rows,
)

_COUNTS, _INDICES = tl.constexpr(COUNTS), tl.constexpr(INDICES)


@triton.jit(do_not_specialize=["heads", "queries", "window_keys", "compressed", "places"])
def _dq_kernel(
    q_ptr,
    kv_ptr,
    intervals_ptr,
    selected_ptr,
    real_ptr,
    out_ptr,
    dout_ptr,
    lse_ptr,
    delta_ptr,
    dq_ptr,
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
    dscale,
    NEED_Q: tl.constexpr,
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
    """dq, and delta = sum(dout * out) of each row. `out`, `dout` and dq are contiguous."""
    head_blocks = tl.cdiv(heads, BLOCK_M)
    head = tl.program_id(0) % head_blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    token = tl.program_id(0) // head_blocks
    b = tl.program_id(1).to(tl.int64)
    valid = head < heads
    row = (b * queries + token) * heads
    dout = load_rows(dout_ptr + row * WIDTH + head * WIDTH, valid, WIDTH, D)
    out = load_rows(out_ptr + row * WIDTH + head * WIDTH, valid, WIDTH, D)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    tl.store(delta_ptr + row + head, delta, mask=valid)
    if NEED_Q:
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
        lse = tl.load(lse_ptr + row + head, mask=valid, other=float("inf"))
        dq = tl.zeros((BLOCK_M, D), dtype=tl.float32)
        for i in tl.range(0, window_blocks + tl.cdiv(limit, BLOCK_N), num_stages=STAGES):
            key, visible = block_of_keys(
                i, window_blocks, start, end, limit, window_keys, selected_ptr, real_ptr, SELECTED, PADDED, BLOCK_N
            )
            kv = load_rows(kv_ptr + key * kv_token_stride, visible, WIDTH, D)
            # Always true: see `_add_rows`.
            if queries > 0:
                scores = dot(q, tl.trans(kv), tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32))
                dweights = dot(dout, tl.trans(kv), tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32))
            else:
                scores = tl.full((BLOCK_M, BLOCK_N), scale, dtype=tl.float32)
                dweights = scores
            weights = tl.exp2(scores * scale - lse[:, None])
            dscores = tl.where(visible[None, :], weights * (dweights - delta[:, None]), 0.0)
            dq = dot(downcast(dscores, kv.dtype), kv, dq)
        store_rows(dq_ptr + row * WIDTH, head * WIDTH, valid, dq * dscale, WIDTH, D)


@triton.jit
def _add_rows(dkv, kv, x, lse, delta, visible, scale, dscale, queries):
    """Add the gradient of the keys `kv` [N, D] from the M rows of dout and q by turns in `x` [2 * M, D].

    One matmul with keys gives dweights and scores (transposed, [keys, rows]), and one with weights and dscores gives
    both parts of the gradient.
    """
    BLOCK_N: tl.constexpr = kv.shape[0]
    BLOCK_M: tl.constexpr = x.shape[0] // 2
    # Always true. Triton lets each warp of a matmul that others depend on have rows of its own, and where warps are
    # more than rows they repeat each other's; inside of a condition it does not see the others. Forward is slower so.
    if queries > 0:
        both = dot(kv, tl.trans(x), tl.zeros((BLOCK_N, 2 * BLOCK_M), dtype=tl.float32))
    else:
        both = tl.full((BLOCK_N, 2 * BLOCK_M), scale, dtype=tl.float32)
    dweights, scores = tl.split(both.reshape(BLOCK_N, BLOCK_M, 2))
    weights = tl.where(visible, tl.exp2(scores * scale - lse[None, :]), 0.0)
    dscores = weights * (dweights - delta[None, :]) * dscale
    both = tl.join(weights, dscores).reshape(BLOCK_N, 2 * BLOCK_M)
    return dot(downcast(both, x.dtype), x, dkv)


@triton.jit(do_not_specialize=["heads", "queries", "first_key", "keys"])
def _dkv_kernel(
    q_ptr,
    kv_ptr,
    spans_ptr,
    intervals_ptr,
    selected_ptr,
    real_ptr,
    dout_ptr,
    lse_ptr,
    delta_ptr,
    dkv_ptr,
    q_batch_stride,
    q_token_stride,
    q_head_stride,
    kv_batch_stride,
    kv_token_stride,
    span_stride,
    interval_stride,
    interval_size,
    selected_batch_stride,
    selected_token_stride,
    real_stride,
    heads,
    queries,
    first_key,
    keys,
    scale,
    dscale,
    COMPRESSED: tl.constexpr,
    SELECTED: tl.constexpr,
    ONE_TOKEN: tl.constexpr,
    PADDED: tl.constexpr,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The gradient of `keys` keys from `first_key`, in float32, from one part of the queries.

    Rows are the heads of all tokens. With INDICES, `selected` is a mask [B, S, keys] here. `spans` are the first token
    that sees a key of a block, and the one after the last.
    """
    block = tl.program_id(0)
    b = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    offset = block * BLOCK_N + tl.arange(0, BLOCK_N)
    valid = offset < keys
    span_ptr = spans_ptr + b * span_stride + 2 * block
    first, last = tl.load(span_ptr), tl.load(span_ptr + 1)
    tokens = tl.cdiv(last - first, tl.num_programs(2))
    first = first + part * tokens
    last = tl.minimum(first + tokens, last)

    q_ptr += b * (q_batch_stride // UNIT * UNIT)
    q_token_stride = q_token_stride // UNIT * UNIT
    q_head_stride = q_head_stride // UNIT * UNIT
    dout_ptr += b * queries * heads * WIDTH
    lse_ptr += b * queries * heads
    delta_ptr += b * queries * heads
    selected_ptr += b * selected_batch_stride
    intervals_ptr += b * interval_stride
    kv_ptr += b * (kv_batch_stride // UNIT * UNIT)
    kv = load_rows(kv_ptr + (first_key + offset) * (kv_token_stride // UNIT * UNIT), valid, WIDTH, D)
    if PADDED:
        real = tl.load(real_ptr + b * real_stride + offset, mask=valid, other=0)
        valid = valid & (real != 0)
    dkv = tl.zeros((BLOCK_N, D), dtype=tl.float32)
    line = tl.arange(0, 2 * BLOCK_M)
    rows = tl.arange(0, BLOCK_M)
    for i in tl.range(0, tl.cdiv((last - first) * heads, BLOCK_M), num_stages=STAGES):
        # Offsets count from the block's first token and head, which fits into 32 bits.
        token = first + i * BLOCK_M // heads
        head = i * BLOCK_M % heads
        if ONE_TOKEN:
            # One value of the token instead of equal ones.
            seen = tl.full((1,), 0, dtype=tl.int32) + token
            inside = rows < BLOCK_M
            line_inside = line < 2 * BLOCK_M
            q_offsets = line // 2 * q_head_stride
        else:
            seen = token + (head + rows) // heads
            inside = seen < last
            line_head = head + line // 2
            line_inside = token + line_head // heads < last
            q_offsets = line_head // heads * q_token_stride + (line_head % heads - head) * q_head_stride
        known = seen < last
        visible = valid[:, None] & inside[None, :]
        if COMPRESSED:
            if SELECTED == _INDICES:
                pointers = selected_ptr + seen.to(tl.int64)[None, :] * selected_token_stride + offset[:, None]
                visible = visible & (tl.load(pointers, mask=(offset < keys)[:, None] & known[None, :], other=0) != 0)
            elif SELECTED == _COUNTS:
                pointers = selected_ptr + seen.to(tl.int64) * selected_token_stride
                count = tl.load(pointers, mask=known, other=0)
                visible = visible & (offset[:, None] < count[None, :])
        else:
            start = tl.load(intervals_ptr + seen, mask=known, other=0)
            end = tl.load(intervals_ptr + interval_size + seen, mask=known, other=0)
            visible = visible & (offset[:, None] >= start[None, :]) & (offset[:, None] < end[None, :])
        row = token.to(tl.int64) * heads + head
        q_lines = q_ptr + token.to(tl.int64) * q_token_stride + head.to(tl.int64) * q_head_stride + q_offsets
        x = load_rows(
            tl.where(line % 2 == 0, dout_ptr + row * WIDTH + line // 2 * WIDTH, q_lines), line_inside, WIDTH, D
        )
        lse = tl.load(lse_ptr + row + rows, mask=inside, other=float("inf"))
        delta = tl.load(delta_ptr + row + rows, mask=inside, other=0.0)
        dkv = _add_rows(dkv, kv, x, lse, delta, visible, scale, dscale, queries)
    dkv_ptr += (part * tl.num_programs(1) + b) * keys * WIDTH
    store_rows(dkv_ptr, offset * WIDTH, offset < keys, dkv, WIDTH, D)


@triton.jit(do_not_specialize=["heads", "queries", "first_token", "first_key", "places"])
def _selected_dkv_kernel(
    q_ptr,
    kv_ptr,
    selected_ptr,
    dout_ptr,
    lse_ptr,
    delta_ptr,
    parts_ptr,
    q_batch_stride,
    q_token_stride,
    q_head_stride,
    kv_batch_stride,
    kv_token_stride,
    selected_batch_stride,
    selected_token_stride,
    parts_batch_stride,
    heads,
    queries,
    first_token,
    first_key,
    places,
    scale,
    dscale,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The part of one query in the gradient of each key that it selects, [tokens, places, WIDTH]."""
    blocks = tl.cdiv(places, BLOCK_N)
    place = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    part = tl.program_id(0) // blocks
    token = first_token + part
    b = tl.program_id(1).to(tl.int64)
    selected_ptr += b * selected_batch_stride + token.to(tl.int64) * selected_token_stride
    entry = tl.load(selected_ptr + place, mask=place < places, other=-1).to(tl.int32)
    valid = entry >= 0
    if tl.max(entry, 0) >= 0:
        q_head_stride = q_head_stride // UNIT * UNIT
        q_ptr += b * (q_batch_stride // UNIT * UNIT) + token.to(tl.int64) * (q_token_stride // UNIT * UNIT)
        kv_ptr += b * (kv_batch_stride // UNIT * UNIT)
        kv = load_rows(kv_ptr + (first_key + entry) * (kv_token_stride // UNIT * UNIT), valid, WIDTH, D)
        row = (b * queries + token) * heads
        line = tl.arange(0, 2 * BLOCK_M)
        rows = tl.arange(0, BLOCK_M)
        dkv = tl.zeros((BLOCK_N, D), dtype=tl.float32)
        for head in tl.range(0, heads, BLOCK_M, num_stages=STAGES):
            inside = head + rows < heads
            dout_lines = dout_ptr + row * WIDTH + (head + line // 2) * WIDTH
            pointers = tl.where(line % 2 == 0, dout_lines, q_ptr + (head + line // 2) * q_head_stride)
            x = load_rows(pointers, head + line // 2 < heads, WIDTH, D)
            lse = tl.load(lse_ptr + row + head + rows, mask=inside, other=float("inf"))
            delta = tl.load(delta_ptr + row + head + rows, mask=inside, other=0.0)
            dkv = _add_rows(dkv, kv, x, lse, delta, valid[:, None] & inside[None, :], scale, dscale, queries)
        parts_ptr += b * parts_batch_stride + part.to(tl.int64) * places * WIDTH
        store_rows(parts_ptr, place * WIDTH, valid, dkv, WIDTH, D)


@triton.jit(do_not_specialize=["keys"])
def _sum_parts_kernel(
    parts_ptr,
    order_ptr,
    starts_ptr,
    dkv_ptr,
    parts_batch_stride,
    order_stride,
    starts_stride,
    keys,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add to the gradient of a key, in float32, the parts of the queries that select it, in their order."""
    key = tl.program_id(0)
    b = tl.program_id(1).to(tl.int64)
    start = tl.load(starts_ptr + b * starts_stride + key)
    end = tl.load(starts_ptr + b * starts_stride + key + 1)
    column = tl.arange(0, D)
    inside = column < WIDTH
    pointers = dkv_ptr + (b * keys + key) * WIDTH + column
    total = tl.load(pointers, mask=inside, other=0.0)
    for i in tl.range(start, end, BLOCK):
        index = i + tl.arange(0, BLOCK)
        valid = index < end
        part = tl.load(order_ptr + b * order_stride + index, mask=valid, other=0)
        rows = load_rows(parts_ptr + b * parts_batch_stride + part.to(tl.int64) * WIDTH, valid, WIDTH, D)
        total += tl.sum(rows.to(tl.float32), 0)
    tl.store(pointers, total, mask=inside)


launch_selected_dkv = KernelLauncher(_selected_dkv_kernel)
launch_sum_parts = KernelLauncher(_sum_parts_kernel)
launch_dq = KernelLauncher(_dq_kernel)
launch_dkv = KernelLauncher(_dkv_kernel)
