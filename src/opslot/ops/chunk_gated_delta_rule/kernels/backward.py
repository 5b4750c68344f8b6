"""The gradients of all arguments.

With the symbols of `system.py` and `forward.py`, from dout and the gradient dS' of the state that leaves a chunk; x is
the gradient of the system's right side b (v - exp(G) k S):

    P = scale tril(q k^T) L,  dd = P^T dout + exp(G_last - G) k dS',  x = M^T dd
    dS = exp(G_last) dS' + scale (exp(G) q)^T dout - reads^T dd
    dP = tril(dout d^T),  dA = -strictly_lower(x d^T)

and the product rule gives the rest. Wherever G_i occurs it scales a row of q, k or S, so that its gradient is made
of row dots of q with dq and of k with the parts of dk.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from opslot._base.jit import dot, downcast
from opslot.ops._common.triton import KernelLauncher, cdiv
from opslot.ops.chunk_gated_delta_rule.kernels.call import Call, as_tokens, strides
from opslot.ops.chunk_gated_delta_rule.kernels.chunks import CHUNK
from opslot.ops.chunk_gated_delta_rule.kernels.forward import Recurrence
from opslot.ops.chunk_gated_delta_rule.kernels.norm import fold
from opslot.ops.chunk_gated_delta_rule.kernels.tiles import (
    COLUMN_STAGES,
    decay,
    load_plane,
    load_scalars,
    load_state,
    load_tokens,
    store_plane,
    store_state,
    store_tokens,
)


@triton.jit
def local_kernel(
    q_ptr,
    k_ptr,
    dout_ptr,
    start_ptr,
    length_ptr,
    cumulated_ptr,
    local_ptr,
    q_token,
    q_head,
    k_token,
    k_head,
    dout_token,
    dout_head,
    scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """P^T dout [chunks * V_heads, CHUNK, V]: the gradient of a correction within its chunk."""
    program = tl.program_id(0)
    start = tl.load(start_ptr + program // HEADS)
    length = tl.load(length_ptr + program // HEADS)
    if length > 0:
        head = program % HEADS
        i = tl.arange(0, CHUNK)
        cumulated = tl.load(cumulated_ptr + program.to(tl.int64) * CHUNK + i)
        within = tl.zeros((CHUNK, CHUNK), dtype=tl.float32)
        for first in tl.range(0, K, BK, num_stages=COLUMN_STAGES):
            row = first + tl.arange(0, BK)
            q = load_tokens(q_ptr, start, length, head // GROUP, q_token, q_head, row, K, CHUNK)
            k = load_tokens(k_ptr, start, length, head // GROUP, k_token, k_head, row, K, CHUNK)
            within = dot(k, tl.trans(q), within)
        # Rows are keys here: the decay from a key to a later query.
        within *= decay(-cumulated, -cumulated, i[:, None] <= i[None, :]) * scale
        for first in tl.range(0, V, BV, num_stages=COLUMN_STAGES):
            column = first + tl.arange(0, BV)
            dout = load_tokens(dout_ptr, start, length, head, dout_token, dout_head, column, V, CHUNK)
            local = dot(downcast(within, q_ptr.dtype.element_ty), dout, tl.zeros((CHUNK, BV), dtype=tl.float32))
            store_plane(local_ptr, local, program, column, V, CHUNK)


@triton.jit
def dstates_kernel(
    q_ptr,
    k_ptr,
    dout_ptr,
    reads_ptr,
    local_ptr,
    cumulated_ptr,
    cu_seqlens_ptr,
    first_chunk_ptr,
    dfinal_ptr,
    dstates_ptr,
    dcorrection_ptr,
    dinitial_ptr,
    q_token,
    q_head,
    k_token,
    k_head,
    dout_token,
    dout_head,
    scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    HAS_DFINAL: tl.constexpr,
    WANT_DINITIAL: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A document's chunks from the last to the first: dS' of the state that leaves each, and its correction's dd."""
    document = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    dtype: tl.constexpr = k_ptr.dtype.element_ty
    row = tl.arange(0, BK)
    column = tl.program_id(1) * BV + tl.arange(0, BV)
    i = tl.arange(0, CHUNK)
    begin = tl.load(cu_seqlens_ptr + document).to(tl.int32)
    end = tl.load(cu_seqlens_ptr + document + 1).to(tl.int32)
    first = tl.load(first_chunk_ptr + document)
    count = tl.load(first_chunk_ptr + document + 1) - first
    dstate = tl.zeros((BK, BV), dtype=tl.float32)
    if HAS_DFINAL:
        dstate += load_state(dfinal_ptr, tl.program_id(0), row, column, K, V).to(tl.float32)
    for step in tl.range(0, count, num_stages=STAGES):
        start = begin + (count - 1 - step) * CHUNK
        index = (first + count - 1 - step) * HEADS + head
        held = downcast(dstate, dtype)
        store_state(dstates_ptr, dstate, index, row, column, K, V)
        q = load_tokens(q_ptr, start, end - start, head // GROUP, q_token, q_head, row, K, CHUNK)
        k = load_tokens(k_ptr, start, end - start, head // GROUP, k_token, k_head, row, K, CHUNK)
        dout = load_tokens(dout_ptr, start, end - start, head, dout_token, dout_head, column, V, CHUNK)
        reads = load_plane(reads_ptr, index, row, K, CHUNK)
        local = load_plane(local_ptr, index, column, V, CHUNK).to(tl.float32)
        cumulated = tl.load(cumulated_ptr + index.to(tl.int64) * CHUNK + i)
        last = tl.load(cumulated_ptr + index.to(tl.int64) * CHUNK + CHUNK - 1)
        later = dot(k, held, tl.zeros((CHUNK, BV), dtype=tl.float32))
        dcorrection = local + later * tl.exp(last - cumulated)[:, None]
        store_plane(dcorrection_ptr, dcorrection, index, column, V, CHUNK)
        asked = downcast(dout.to(tl.float32) * (tl.exp(cumulated) * scale)[:, None], dtype)
        dstate = dot(tl.trans(q), asked, dstate * tl.exp(last))
        dstate = dot(tl.trans(reads), downcast(-dcorrection, dtype), dstate)
    if WANT_DINITIAL:
        store_state(dinitial_ptr, dstate, tl.program_id(0), row, column, K, V)


@triton.jit
def dvalue_kernel(
    v_ptr,
    beta_ptr,
    dout_ptr,
    start_ptr,
    length_ptr,
    cumulated_ptr,
    inverse_ptr,
    correction_ptr,
    dcorrection_ptr,
    x_ptr,
    dwithin_ptr,
    dsystem_ptr,
    dv_ptr,
    drate_ptr,
    v_token,
    v_head,
    dout_token,
    dout_head,
    scale,
    HEADS: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """x, dv, v's part of the rates' gradient, and scale dP L and dA L [chunks * V_heads, CHUNK, CHUNK]."""
    program = tl.program_id(0)
    start = tl.load(start_ptr + program // HEADS)
    length = tl.load(length_ptr + program // HEADS)
    if length > 0:
        head = program % HEADS
        dtype: tl.constexpr = v_ptr.dtype.element_ty
        i = tl.arange(0, CHUNK)
        rate = load_scalars(beta_ptr, start, length, head, HEADS, CHUNK)
        cumulated = tl.load(cumulated_ptr + program.to(tl.int64) * CHUNK + i)
        inverse = load_plane(inverse_ptr, program, i, CHUNK, CHUNK)
        dwithin = tl.zeros((CHUNK, CHUNK), dtype=tl.float32)
        dsystem = tl.zeros((CHUNK, CHUNK), dtype=tl.float32)
        drate = tl.zeros((CHUNK,), dtype=tl.float32)
        for first in tl.range(0, V, BV, num_stages=COLUMN_STAGES):
            column = first + tl.arange(0, BV)
            v = load_tokens(v_ptr, start, length, head, v_token, v_head, column, V, CHUNK).to(tl.float32)
            dout = load_tokens(dout_ptr, start, length, head, dout_token, dout_head, column, V, CHUNK)
            correction = load_plane(correction_ptr, program, column, V, CHUNK)
            dcorrection = load_plane(dcorrection_ptr, program, column, V, CHUNK)
            x = dot(tl.trans(inverse), dcorrection, tl.zeros((CHUNK, BV), dtype=tl.float32))
            store_plane(x_ptr, x, program, column, V, CHUNK)
            store_tokens(dv_ptr, x * rate[:, None], start, length, head, column, HEADS, V, CHUNK)
            drate += tl.sum(x * v, 1)
            dwithin = dot(dout, tl.trans(correction), dwithin)
            dsystem = dot(downcast(-x, dtype), tl.trans(correction), dsystem)
        dwithin *= decay(cumulated, cumulated, i[:, None] >= i[None, :]) * scale
        dsystem *= decay(cumulated, cumulated, i[:, None] > i[None, :])
        store_plane(dwithin_ptr, dwithin, program, i, CHUNK, CHUNK)
        store_plane(dsystem_ptr, dsystem, program, i, CHUNK, CHUNK)
        tl.store(drate_ptr + program.to(tl.int64) * CHUNK + i, drate)


@triton.jit
def dkey_kernel(
    q_ptr,
    k_ptr,
    beta_ptr,
    dout_ptr,
    start_ptr,
    length_ptr,
    cumulated_ptr,
    states_ptr,
    dstates_ptr,
    correction_ptr,
    x_ptr,
    dwithin_ptr,
    dsystem_ptr,
    drate_ptr,
    dq_ptr,
    dk_ptr,
    dbeta_ptr,
    dg_ptr,
    q_token,
    q_head,
    k_token,
    k_head,
    dout_token,
    dout_head,
    scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """dq and dk of each value head [T, V_heads, K], dbeta and dg [T, V_heads]."""
    program = tl.program_id(0)
    start = tl.load(start_ptr + program // HEADS)
    length = tl.load(length_ptr + program // HEADS)
    if length > 0:
        head = program % HEADS
        dtype: tl.constexpr = k_ptr.dtype.element_ty
        i = tl.arange(0, CHUNK)
        rate = load_scalars(beta_ptr, start, length, head, HEADS, CHUNK)
        offset = program.to(tl.int64) * CHUNK + i
        cumulated = tl.load(cumulated_ptr + offset)
        last = tl.load(cumulated_ptr + program.to(tl.int64) * CHUNK + CHUNK - 1)
        dwithin = load_plane(dwithin_ptr, program, i, CHUNK, CHUNK)
        dsystem = load_plane(dsystem_ptr, program, i, CHUNK, CHUNK)
        drate = tl.load(drate_ptr + offset)
        dcumulated = tl.zeros((CHUNK,), dtype=tl.float32)
        # Decay of the state over the chunk, one block of columns at a time.
        faded = tl.zeros((BV,), dtype=tl.float32)
        for first_row in tl.range(0, K, BK, num_stages=COLUMN_STAGES):
            row = first_row + tl.arange(0, BK)
            dq = tl.zeros((CHUNK, BK), dtype=tl.float32)
            written = tl.zeros((CHUNK, BK), dtype=tl.float32)
            read = tl.zeros((CHUNK, BK), dtype=tl.float32)
            for first_column in tl.range(0, V, BV, num_stages=COLUMN_STAGES):
                column = first_column + tl.arange(0, BV)
                dout = load_tokens(dout_ptr, start, length, head, dout_token, dout_head, column, V, CHUNK)
                correction = load_plane(correction_ptr, program, column, V, CHUNK)
                x = load_plane(x_ptr, program, column, V, CHUNK)
                state = load_state(states_ptr, program, row, column, K, V)
                dstate = load_state(dstates_ptr, program, row, column, K, V)
                dq = dot(dout, tl.trans(state), dq)
                written = dot(correction, tl.trans(dstate), written)
                read = dot(x, tl.trans(state), read)
                faded += tl.sum(state.to(tl.float32) * dstate.to(tl.float32), 0)
            q = load_tokens(q_ptr, start, length, head // GROUP, q_token, q_head, row, K, CHUNK)
            k = load_tokens(k_ptr, start, length, head // GROUP, k_token, k_head, row, K, CHUNK)
            k_fp32 = k.to(tl.float32)
            dq = dot(dwithin, k, dq * (scale * tl.exp(cumulated))[:, None])
            store_tokens(dq_ptr, dq, start, length, head, row, HEADS, K, CHUNK)
            dcumulated += tl.sum(q.to(tl.float32) * dq, 1)
            # Writes of a key decay after its token: state, output and corrections of later tokens.
            written *= tl.exp(last - cumulated)[:, None]
            dcumulated += tl.where(i == CHUNK - 1, tl.sum(k_fp32 * written), 0.0)
            written = dot(tl.trans(dwithin), q, written)
            written = dot(tl.trans(dsystem), downcast(k_fp32 * rate[:, None], dtype), written)
            # Its reads decay until its token.
            read = dot(dsystem, k, -read * tl.exp(cumulated)[:, None])
            drate += tl.sum(k_fp32 * read, 1)
            read *= rate[:, None]
            dcumulated += tl.sum(k_fp32 * (read - written), 1)
            store_tokens(dk_ptr, read + written, start, length, head, row, HEADS, K, CHUNK)
        dcumulated += tl.where(i == CHUNK - 1, tl.exp(last) * tl.sum(faded), 0.0)
        # A token's own log decay is part of its own and all later sums of the chunk.
        dg = tl.sum(tl.where(i[:, None] >= i[None, :], dcumulated[:, None], 0.0), 0)
        offset = (start + i).to(tl.int64) * HEADS + head
        tl.store(dg_ptr + offset, downcast(dg, dg_ptr.dtype.element_ty), mask=i < length)
        tl.store(dbeta_ptr + offset, downcast(drate, dbeta_ptr.dtype.element_ty), mask=i < length)


_launch_local = KernelLauncher(local_kernel)
_launch_dstates = KernelLauncher(dstates_kernel)
_launch_dvalue = KernelLauncher(dvalue_kernel)
_launch_dkey = KernelLauncher(dkey_kernel)


def write_gradients(
    call: Call,
    found: Recurrence,
    dout: Tensor,
    dfinal: Tensor | None,
    grads: tuple[Tensor, ...],
    dinitial: Tensor | None,
    normalize: bool,
) -> None:
    """Fill `grads` of query, key, value, g and beta, and `dinitial` if it is wanted."""
    dq, dk, dv, dg, dbeta = grads
    dout = as_tokens(dout)
    plan, table = call.plan, (call.chunks.start, call.chunks.length)
    dstates, dcorrection = _walk_back(call, found, dout, dfinal, dinitial)
    x = call.by_chunk(CHUNK, call.value)
    dwithin, dsystem = (call.by_chunk(CHUNK, CHUNK) for _ in range(2))
    drate = call.by_chunk(CHUNK, dtype=torch.float32)
    for_values = (call.v, call.rate, dout, *table, found.cumulated, found.inverse, found.correction, dcorrection)
    _launch_dvalue(
        (call.per_chunk, 1, 1),
        (*for_values, x, dwithin, dsystem, dv, drate),
        strides(call.v, dout),
        (call.scale,),
        (call.heads, call.value, plan.grad_block, CHUNK),
        4,
    )
    folds = normalize or call.group > 1
    of_heads = [dx.new_empty(dout.shape[0], call.heads, call.key) if folds else dx for dx in (dq, dk)]
    for_keys = (call.q, call.k, call.rate, dout, *table, found.cumulated, found.states, dstates, found.correction)
    _launch_dkey(
        (call.per_chunk, 1, 1),
        (*for_keys, x, dwithin, dsystem, drate, *of_heads, dbeta, dg),
        strides(call.q, call.k, dout),
        (call.scale,),
        (*call.sizes, *call.blocks(plan.grad_block)),
        4,
    )
    if folds:
        fold(call.raw_q, of_heads[0], dq, call.group, normalize)
        fold(call.raw_k, of_heads[1], dk, call.group, normalize)


def _walk_back(
    call: Call, found: Recurrence, dout: Tensor, dfinal: Tensor | None, dinitial: Tensor | None
) -> tuple[Tensor, Tensor]:
    """dS' [chunks * V_heads, K, V] and dd [chunks * V_heads, 64, V] of every chunk; fills `dinitial`."""
    plan, chunks = call.plan, call.chunks
    local, dcorrection = (call.by_chunk(CHUNK, call.value) for _ in range(2))
    dstates = call.by_chunk(call.key, call.value)
    _launch_local(
        (call.per_chunk, 1, 1),
        (call.q, call.k, dout, chunks.start, chunks.length, found.cumulated, local),
        strides(call.q, call.k, dout),
        (call.scale,),
        (*call.sizes, *call.blocks(plan.value_block)),
        4,
    )
    last = None if dfinal is None else dfinal.contiguous()
    given = (call.q, call.k, dout, found.reads, local, found.cumulated, chunks.cu_seqlens, chunks.first, last)
    _launch_dstates(
        (chunks.documents * call.heads, cdiv(call.value, plan.state_block), 1),
        (*given, dstates, dcorrection, dinitial),
        strides(call.q, call.k, dout),
        (call.scale,),
        (*call.sizes, last is not None, dinitial is not None, plan.key, plan.state_block, CHUNK, plan.stages),
        4,
    )
    return dstates, dcorrection
