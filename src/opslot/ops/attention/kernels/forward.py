"""Forward of attention in Triton.

The query heads of a key/value head are rows of one tile: row r is head r % GROUP at token r // GROUP. A tile of rows
then spans few tokens, which keeps the masked part of causal and windowed blocks small, and the gradients of keys and
values sum over the group inside one program.

Logits are in base 2. Head sizes that are not a power of two are two tiles, D and TAIL columns wide.
"""

from __future__ import annotations

import triton
import triton.language as tl

from opslot._base.jit import dot, downcast
from opslot._base.kernel_launch import KernelLauncher
from opslot.ops.attention.kernels.selected_tiles import selected, tile_list


@triton.jit
def load_tile(
    base_ptr,
    offsets,
    valid,
    FIRST: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Columns FIRST to FIRST + COLUMNS of rows at `offsets`; zeros past WIDTH, and with MASKED in rows not `valid`."""
    column = FIRST + tl.arange(0, COLUMNS)
    pointers = base_ptr + offsets[:, None] + column[None, :]
    if MASKED:
        mask = valid[:, None]
        if FIRST + COLUMNS > WIDTH:
            mask = mask & (column < WIDTH)[None, :]
        x = tl.load(pointers, mask=mask, other=0.0)
    elif FIRST + COLUMNS > WIDTH:
        x = tl.load(pointers, mask=(column < WIDTH)[None, :], other=0.0)
    else:
        x = tl.load(pointers)
    return x


@triton.jit
def store_tile(base_ptr, offsets, valid, x, FIRST: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    column = FIRST + tl.arange(0, COLUMNS)
    mask = valid[:, None] & (column < WIDTH)[None, :]
    tl.store(base_ptr + offsets[:, None] + column[None, :], downcast(x, base_ptr.dtype.element_ty), mask=mask)


@triton.jit
def tile_of_program(kv_heads, batch, BLOCK_M: tl.constexpr):
    """The key head, the sample and the first row of a program. Those of the last rows take longest under causality, and
    come first.
    """
    kv_head = tl.program_id(0) % kv_heads
    b = tl.program_id(0) // kv_heads % batch
    first_row = (tl.num_programs(0) // (kv_heads * batch) - 1 - tl.program_id(0) // (kv_heads * batch)) * BLOCK_M
    return kv_head, b, first_row


@triton.jit
def tokens_of(first_row, rows, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """The rows of a tile, which of them exist, their tokens, and the first and the last of these."""
    row = first_row + tl.arange(0, BLOCK_M)
    last_token = (tl.minimum(first_row + BLOCK_M, rows) - 1) // GROUP
    return row, row < rows, row // GROUP, first_row // GROUP, last_token


@triton.jit
def row_offsets(row, first_token, token_stride, head_stride, GROUP: tl.constexpr):
    """Offsets of rows from `first_token`."""
    return (row // GROUP - first_token) * token_stride + (row % GROUP) * head_stride


@triton.jit
def tanh(x):
    """tanh with an error of few ULP, also near 0; libdevice's is not available in the interpreter."""
    squared = x * x
    series = x * (1 + squared * (-1 / 3 + squared * (2 / 15 + squared * (-17 / 315 + squared * (62 / 2835)))))
    decay = tl.exp2(-2.8853900817779268 * tl.abs(x))
    exact = (1 - decay) / (1 + decay)
    return tl.where(squared < 0.09, series, tl.where(x < 0, -exact, exact))


@triton.jit
def head_of(ptr, b, head, batch_stride, head_stride, UNIT: tl.constexpr):
    """The first token of a head; strides are known to be multiples of UNIT, which loads of 16 bytes require."""
    return ptr + b.to(tl.int64) * (batch_stride // UNIT * UNIT) + head.to(tl.int64) * (head_stride // UNIT * UNIT)


@triton.jit
def seen_interval(start_ptr, size, token, valid, first, last, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """What each token of a tile sees, start and end; the first block that tokens `first` to `last` see, their number,
    and those that all see. Intervals are in units of GROUP.
    """
    end_ptr = start_ptr + size
    token_start = tl.load(start_ptr + token, mask=valid, other=0) * GROUP
    token_end = tl.load(end_ptr + token, mask=valid, other=0) * GROUP
    start = tl.load(start_ptr + first) * GROUP
    blocks = tl.cdiv(tl.load(end_ptr + last) * GROUP - start, BLOCK)
    full_from = tl.cdiv(tl.load(start_ptr + last) * GROUP - start, BLOCK)
    full_to = tl.maximum((tl.load(end_ptr + first) * GROUP - start) // BLOCK, full_from)
    return token_start, token_end, start, blocks, full_from, full_to


@triton.jit
def part_of_blocks(blocks, full_from, full_to, MASKED: tl.constexpr):
    """Number of blocks that a whole tile sees, or of those before and after them, which it sees in part; how many are
    before, and how many to skip from there on.
    """
    left = full_from if MASKED else 0
    skip = full_to - full_from if MASKED else full_from
    return blocks - full_to + full_from if MASKED else full_to - full_from, left, skip


@triton.jit
def block_start(i, left, skip, first, tiles_ptr, SELECTED: tl.constexpr, BLOCK: tl.constexpr):
    """The first key or row of block `i` of a part: of a list of tiles, or counted from `first`."""
    if SELECTED:
        start = tl.load(tiles_ptr + i) * BLOCK
    else:
        start = first + tl.where(i < left, i, i + skip) * BLOCK
    return start


@triton.jit(do_not_specialize=["batch", "kv_heads", "queries", "keys"])
def _forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    sinks_ptr,
    intervals_ptr,
    bits_ptr,
    tiles_ptr,
    out_ptr,
    lse_ptr,
    q_batch_stride,
    q_token_stride,
    q_head_stride,
    k_batch_stride,
    k_token_stride,
    k_head_stride,
    v_batch_stride,
    v_token_stride,
    v_head_stride,
    interval_stride,
    interval_size,
    batch,
    kv_heads,
    queries,
    keys,
    scale,
    softcap,
    GROUP: tl.constexpr,
    SELECTED: tl.constexpr,
    HEADS_APART: tl.constexpr,
    WHOLE: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    TAIL: tl.constexpr,
    DV: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    rows = queries * GROUP
    kv_head, b, first_row = tile_of_program(kv_heads, batch, BLOCK_M)
    row, valid, token, first_token, last_token = tokens_of(first_row, rows, GROUP, BLOCK_M)
    # Known to be multiples of UNIT, which loads of 16 bytes require.
    q_token_stride = q_token_stride // UNIT * UNIT
    q_head_stride = q_head_stride // UNIT * UNIT
    k_token_stride = k_token_stride // UNIT * UNIT
    v_token_stride = v_token_stride // UNIT * UNIT

    if SELECTED:
        bits_row = b * kv_heads + kv_head if HEADS_APART else b
        tile = bits_row * tl.cdiv(rows, BLOCK_M) + first_row // BLOCK_M
        tiles_ptr, blocks = tile_list(tiles_ptr, tile, tl.cdiv(keys, BLOCK_N))
        bits_ptr += (bits_row.to(tl.int64) * queries + token) * tl.cdiv(keys, 32)
        full_from = 0
        full_to = 0
        first_key = 0
    else:
        intervals_ptr += b.to(tl.int64) * interval_stride
        row_start, row_end, first_key, blocks, full_from, full_to = seen_interval(
            intervals_ptr, interval_size, token, valid, first_token, last_token, 1, BLOCK_N
        )

    q_ptr = head_of(q_ptr, b, kv_head * GROUP, q_batch_stride, q_head_stride, UNIT)
    q_ptr += first_token.to(tl.int64) * q_token_stride
    k_ptr = head_of(k_ptr, b, kv_head, k_batch_stride, k_head_stride, UNIT)
    v_ptr = head_of(v_ptr, b, kv_head, v_batch_stride, v_head_stride, UNIT)
    q_offsets = row_offsets(row, first_token, q_token_stride, q_head_stride, GROUP)
    q = load_tile(q_ptr, q_offsets, valid, 0, D, HEAD_DIM, True)
    if TAIL > 0:
        q_tail = load_tile(q_ptr, q_offsets, valid, D, TAIL, HEAD_DIM, True)

    if HAS_SINKS:
        sink = tl.load(sinks_ptr + kv_head * GROUP + row % GROUP).to(tl.float32)
        top = sink * 1.4426950408889634
        total = tl.full((BLOCK_M,), 1.0, dtype=tl.float32)
    else:
        # Finite, so that rows without a visible key stay finite.
        top = tl.full((BLOCK_M,), -1e30, dtype=tl.float32)
        total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    acc = tl.zeros((BLOCK_M, DV), dtype=tl.float32)
    column = tl.arange(0, BLOCK_N)
    # First the blocks of keys that all rows see, then those before and after them. All blocks of selected keys are
    # of the second kind.
    for MASKED in tl.static_range(SELECTED, 2):
        count, left, skip = part_of_blocks(blocks, full_from, full_to, MASKED)
        for i in tl.range(0, count, num_stages=STAGES):
            start = block_start(i, left, skip, first_key, tiles_ptr, SELECTED, BLOCK_N)
            inside = start + column < keys
            k_block = k_ptr + start.to(tl.int64) * k_token_stride
            k = load_tile(k_block, column * k_token_stride, inside, 0, D, HEAD_DIM, MASKED and not WHOLE)
            zeros = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            scores = dot(q, tl.trans(k), zeros)
            if TAIL > 0:
                k_tail = load_tile(k_block, column * k_token_stride, inside, D, TAIL, HEAD_DIM, MASKED and not WHOLE)
                scores = dot(q_tail, tl.trans(k_tail), scores)
            if SOFTCAP:
                scores = softcap * tanh(scores * scale)
            if SELECTED:
                scores = tl.where(selected(bits_ptr, start, keys, valid, BLOCK_N), scores, float("-inf"))
            elif MASKED:
                key = (start + column)[None, :]
                scores = tl.where((key >= row_start[:, None]) & (key < row_end[:, None]), scores, float("-inf"))
            if SOFTCAP:
                new_top = tl.maximum(top, tl.max(scores, 1))
                weights = tl.exp2(scores - new_top[:, None])
            else:
                new_top = tl.maximum(top, tl.max(scores, 1) * scale)
                weights = tl.exp2(scores * scale - new_top[:, None])
            decay = tl.exp2(top - new_top)
            total = total * decay + tl.sum(weights, 1)
            acc = acc * decay[:, None]
            v_block = v_ptr + start.to(tl.int64) * v_token_stride
            v = load_tile(v_block, column * v_token_stride, inside, 0, DV, V_HEAD_DIM, MASKED and not WHOLE)
            acc = dot(downcast(weights, v.dtype), v, acc)
            top = new_top

    heads = kv_heads * GROUP
    out_ptr += ((b.to(tl.int64) * queries + first_token) * heads + kv_head * GROUP) * V_HEAD_DIM
    out_offsets = row_offsets(row, first_token, heads * V_HEAD_DIM, V_HEAD_DIM, GROUP)
    out = acc / tl.where(total > 0, total, 1.0)[:, None]
    store_tile(out_ptr, out_offsets, valid, out, 0, DV, V_HEAD_DIM)
    lse = tl.where(total > 0, top + tl.log2(tl.where(total > 0, total, 1.0)), float("inf"))
    tl.store(lse_ptr + (b * kv_heads + kv_head).to(tl.int64) * rows + row, lse, mask=valid)


launch_forward = KernelLauncher(_forward_kernel)
