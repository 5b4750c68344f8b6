"""Backward of attention in Triton: one kernel over rows for dq, then one over keys for dk and dv.

Each computes the scores again from the logsumexp. No atomics, so the gradients are deterministic.
"""

from __future__ import annotations

import triton
import triton.language as tl

from opslot._base.jit import dot, downcast
from opslot._base.kernel_launch import KernelLauncher
from opslot.ops.attention.kernels.forward import (
    block_start,
    head_of,
    load_tile,
    part_of_blocks,
    row_offsets,
    seen_interval,
    store_tile,
    tanh,
    tile_of_program,
    tokens_of,
)
from opslot.ops.attention.kernels.selected_tiles import selected, tile_list


@triton.jit
def _weights(scores, lse, scale, softcap, SOFTCAP: tl.constexpr):
    """Softmax weights of unscaled scores, and the derivative of the softcap."""
    if SOFTCAP:
        capped = tanh(scores * scale)
        weights = tl.exp2(softcap * capped - lse)
        derivative = 1 - capped * capped
    else:
        weights = tl.exp2(scores * scale - lse)
        derivative = 1.0
    return weights, derivative


@triton.jit(do_not_specialize=["batch", "kv_heads", "queries", "keys"])
def _dq_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    dout_ptr,
    intervals_ptr,
    bits_ptr,
    tiles_ptr,
    lse_ptr,
    delta_ptr,
    dq_ptr,
    q_batch_stride,
    q_token_stride,
    q_head_stride,
    k_batch_stride,
    k_token_stride,
    k_head_stride,
    v_batch_stride,
    v_token_stride,
    v_head_stride,
    dout_batch_stride,
    dout_token_stride,
    dout_head_stride,
    interval_stride,
    interval_size,
    batch,
    kv_heads,
    queries,
    keys,
    scale,
    softcap,
    dscale,
    GROUP: tl.constexpr,
    SELECTED: tl.constexpr,
    HEADS_APART: tl.constexpr,
    WHOLE: tl.constexpr,
    NEED_Q: tl.constexpr,
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
    """dq, and delta = sum(dout * out) of each row."""
    rows = queries * GROUP
    kv_head, b, first_row = tile_of_program(kv_heads, batch, BLOCK_M)
    row, valid, token, first_token, last_token = tokens_of(first_row, rows, GROUP, BLOCK_M)
    heads = kv_heads * GROUP

    dout_token_stride = dout_token_stride // UNIT * UNIT
    dout_head_stride = dout_head_stride // UNIT * UNIT
    dout_ptr = head_of(dout_ptr, b, kv_head * GROUP, dout_batch_stride, dout_head_stride, UNIT)
    dout_ptr += first_token.to(tl.int64) * dout_token_stride
    dout_offsets = row_offsets(row, first_token, dout_token_stride, dout_head_stride, GROUP)
    dout = load_tile(dout_ptr, dout_offsets, valid, 0, DV, V_HEAD_DIM, True)
    out_ptr += ((b.to(tl.int64) * queries + first_token) * heads + kv_head * GROUP) * V_HEAD_DIM
    out_offsets = row_offsets(row, first_token, heads * V_HEAD_DIM, V_HEAD_DIM, GROUP)
    out = load_tile(out_ptr, out_offsets, valid, 0, DV, V_HEAD_DIM, True)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    scalars = (b * kv_heads + kv_head).to(tl.int64) * rows + row
    tl.store(delta_ptr + scalars, delta, mask=valid)

    if NEED_Q:
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
        dq = tl.zeros((BLOCK_M, D), dtype=tl.float32)
        if TAIL > 0:
            q_tail = load_tile(q_ptr, q_offsets, valid, D, TAIL, HEAD_DIM, True)
            dq_tail = tl.zeros((BLOCK_M, TAIL), dtype=tl.float32)
        lse = tl.load(lse_ptr + scalars, mask=valid, other=float("inf"))
        column = tl.arange(0, BLOCK_N)
        for MASKED in tl.static_range(SELECTED, 2):
            count, left, skip = part_of_blocks(blocks, full_from, full_to, MASKED)
            for i in tl.range(0, count, num_stages=STAGES):
                start = block_start(i, left, skip, first_key, tiles_ptr, SELECTED, BLOCK_N)
                inside = start + column < keys
                k_block = k_ptr + start.to(tl.int64) * k_token_stride
                k = load_tile(k_block, column * k_token_stride, inside, 0, D, HEAD_DIM, MASKED and not WHOLE)
                v_block = v_ptr + start.to(tl.int64) * v_token_stride
                v = load_tile(v_block, column * v_token_stride, inside, 0, DV, V_HEAD_DIM, MASKED and not WHOLE)
                zeros = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
                scores = dot(q, tl.trans(k), zeros)
                if TAIL > 0:
                    k_tail = load_tile(
                        k_block, column * k_token_stride, inside, D, TAIL, HEAD_DIM, MASKED and not WHOLE
                    )
                    scores = dot(q_tail, tl.trans(k_tail), scores)
                dweights = dot(dout, tl.trans(v), zeros)
                weights, derivative = _weights(scores, lse[:, None], scale, softcap, SOFTCAP)
                if SELECTED:
                    weights = tl.where(selected(bits_ptr, start, keys, valid, BLOCK_N), weights, 0.0)
                elif MASKED:
                    key = (start + column)[None, :]
                    weights = tl.where((key >= row_start[:, None]) & (key < row_end[:, None]), weights, 0.0)
                dscores = downcast(weights * (dweights - delta[:, None]) * derivative, k.dtype)
                dq = dot(dscores, k, dq)
                if TAIL > 0:
                    dq_tail = dot(dscores, k_tail, dq_tail)
        dq_ptr += ((b.to(tl.int64) * queries + first_token) * heads + kv_head * GROUP) * HEAD_DIM
        dq_offsets = row_offsets(row, first_token, heads * HEAD_DIM, HEAD_DIM, GROUP)
        store_tile(dq_ptr, dq_offsets, valid, dq * dscale, 0, D, HEAD_DIM)
        if TAIL > 0:
            store_tile(dq_ptr, dq_offsets, valid, dq_tail * dscale, D, TAIL, HEAD_DIM)


@triton.jit(do_not_specialize=["batch", "kv_heads", "queries", "keys"])
def _dk_dv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    intervals_ptr,
    bits_ptr,
    tiles_ptr,
    lse_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
    q_batch_stride,
    q_token_stride,
    q_head_stride,
    k_batch_stride,
    k_token_stride,
    k_head_stride,
    v_batch_stride,
    v_token_stride,
    v_head_stride,
    dout_batch_stride,
    dout_token_stride,
    dout_head_stride,
    interval_stride,
    interval_size,
    batch,
    kv_heads,
    queries,
    keys,
    scale,
    softcap,
    dscale,
    GROUP: tl.constexpr,
    SELECTED: tl.constexpr,
    HEADS_APART: tl.constexpr,
    WHOLE: tl.constexpr,
    NEED_K: tl.constexpr,
    NEED_V: tl.constexpr,
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
    # The first keys first: under causality they take longest.
    kv_head = tl.program_id(0) % kv_heads
    b = tl.program_id(0) // kv_heads % batch
    first_key = tl.program_id(0) // (kv_heads * batch) * BLOCK_N
    rows = queries * GROUP
    key = first_key + tl.arange(0, BLOCK_N)
    valid = key < keys
    last_key = tl.minimum(first_key + BLOCK_N, keys) - 1
    q_token_stride = q_token_stride // UNIT * UNIT
    q_head_stride = q_head_stride // UNIT * UNIT
    k_token_stride = k_token_stride // UNIT * UNIT
    v_token_stride = v_token_stride // UNIT * UNIT
    dout_token_stride = dout_token_stride // UNIT * UNIT
    dout_head_stride = dout_head_stride // UNIT * UNIT

    if SELECTED:
        bits_row = b * kv_heads + kv_head if HEADS_APART else b
        tile = bits_row * tl.cdiv(keys, BLOCK_N) + first_key // BLOCK_N
        tiles_ptr, blocks = tile_list(tiles_ptr, tile, tl.cdiv(rows, BLOCK_M))
        # Transposed: the queries that see each key.
        bits_ptr += (bits_row.to(tl.int64) * keys + key) * tl.cdiv(queries, 32)
        full_from = 0
        full_to = 0
        first_row = 0
    else:
        intervals_ptr += 2 * interval_size + b.to(tl.int64) * interval_stride
        key_start, key_end, first_row, blocks, full_from, full_to = seen_interval(
            intervals_ptr, interval_size, key, valid, first_key, last_key, GROUP, BLOCK_M
        )

    q_ptr = head_of(q_ptr, b, kv_head * GROUP, q_batch_stride, q_head_stride, UNIT)
    dout_ptr = head_of(dout_ptr, b, kv_head * GROUP, dout_batch_stride, dout_head_stride, UNIT)
    k_ptr = head_of(k_ptr, b, kv_head, k_batch_stride, k_head_stride, UNIT) + first_key.to(tl.int64) * k_token_stride
    v_ptr = head_of(v_ptr, b, kv_head, v_batch_stride, v_head_stride, UNIT) + first_key.to(tl.int64) * v_token_stride
    lse_ptr += (b * kv_heads + kv_head).to(tl.int64) * rows
    delta_ptr += (b * kv_heads + kv_head).to(tl.int64) * rows
    offset = tl.arange(0, BLOCK_N)
    k = load_tile(k_ptr, offset * k_token_stride, valid, 0, D, HEAD_DIM, True)
    v = load_tile(v_ptr, offset * v_token_stride, valid, 0, DV, V_HEAD_DIM, True)
    dk = tl.zeros((BLOCK_N, D if NEED_K else 1), dtype=tl.float32)
    dv = tl.zeros((BLOCK_N, DV if NEED_V else 1), dtype=tl.float32)
    if TAIL > 0:
        k_tail = load_tile(k_ptr, offset * k_token_stride, valid, D, TAIL, HEAD_DIM, True)
        dk_tail = tl.zeros((BLOCK_N, TAIL), dtype=tl.float32)
    # Scores are transposed, [keys, rows].
    for MASKED in tl.static_range(SELECTED, 2):
        count, left, skip = part_of_blocks(blocks, full_from, full_to, MASKED)
        for i in tl.range(0, count, num_stages=STAGES):
            start = block_start(i, left, skip, first_row, tiles_ptr, SELECTED, BLOCK_M)
            row = start + tl.arange(0, BLOCK_M)
            inside = row < rows
            first_token = start // GROUP
            q_offsets = row_offsets(row, first_token, q_token_stride, q_head_stride, GROUP)
            q_block = q_ptr + first_token.to(tl.int64) * q_token_stride
            q = load_tile(q_block, q_offsets, inside, 0, D, HEAD_DIM, MASKED and not WHOLE)
            if MASKED and not WHOLE:
                lse = tl.load(lse_ptr + row, mask=inside, other=float("inf"))
            else:
                lse = tl.load(lse_ptr + row)
            zeros = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
            scores = dot(k, tl.trans(q), zeros)
            if TAIL > 0:
                q_tail = load_tile(q_block, q_offsets, inside, D, TAIL, HEAD_DIM, MASKED and not WHOLE)
                scores = dot(k_tail, tl.trans(q_tail), scores)
            weights, derivative = _weights(scores, lse[None, :], scale, softcap, SOFTCAP)
            if SELECTED:
                weights = tl.where(selected(bits_ptr, first_token, queries, valid, BLOCK_M, GROUP), weights, 0.0)
            elif MASKED:
                visible = (row[None, :] >= key_start[:, None]) & (row[None, :] < key_end[:, None])
                weights = tl.where(visible, weights, 0.0)
            dout_offsets = row_offsets(row, first_token, dout_token_stride, dout_head_stride, GROUP)
            dout_block = dout_ptr + first_token.to(tl.int64) * dout_token_stride
            dout = load_tile(dout_block, dout_offsets, inside, 0, DV, V_HEAD_DIM, MASKED and not WHOLE)
            if NEED_V:
                dv = dot(downcast(weights, dout.dtype), dout, dv)
            if NEED_K:
                if MASKED and not WHOLE:
                    delta = tl.load(delta_ptr + row, mask=inside, other=0.0)
                else:
                    delta = tl.load(delta_ptr + row)
                dweights = dot(v, tl.trans(dout), zeros)
                dscores = downcast(weights * (dweights - delta[None, :]) * derivative, q.dtype)
                dk = dot(dscores, q, dk)
                if TAIL > 0:
                    dk_tail = dot(dscores, q_tail, dk_tail)
    token = (b.to(tl.int64) * keys + first_key) * kv_heads + kv_head
    if NEED_V:
        store_tile(dv_ptr + token * V_HEAD_DIM, offset * kv_heads * V_HEAD_DIM, valid, dv, 0, DV, V_HEAD_DIM)
    if NEED_K:
        dk_ptr += token * HEAD_DIM
        dk_offsets = offset * kv_heads * HEAD_DIM
        store_tile(dk_ptr, dk_offsets, valid, dk * dscale, 0, D, HEAD_DIM)
        if TAIL > 0:
            store_tile(dk_ptr, dk_offsets, valid, dk_tail * dscale, D, TAIL, HEAD_DIM)


launch_dq = KernelLauncher(_dq_kernel)
launch_dk_dv = KernelLauncher(_dk_dv_kernel)
