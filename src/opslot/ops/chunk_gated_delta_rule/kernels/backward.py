"""The gradients of all arguments.

With the symbols of `system.py` and `forward.py`, from dout and the gradient dS' of the state that leaves a chunk; du is
the gradient of the residual, and dv also that of exp(G) k S, negated:

    du = W^T dout + b exp(G_last - G) k dS',  dv = N^T du
    dS = exp(G_last) dS' + scale (exp(G) q)^T dout - (exp(G) k)^T dv
    dW = tril(dout u^T),  dA = -strictly_lower(dv u^T)

and the product rule gives the rest. Wherever b_j occurs it scales what token j writes, and wherever G_i occurs it
scales a row of q, k or S, so that their gradients are row dots of q and k with dq and parts of dk.

In g's gradient, the row dots of dW's and dA's rows nearly cancel those of their columns, so both must use the same
rounded values. Each matrix is therefore rounded to the inputs' dtype once, after it is scaled. Reciprocal norms and b
are split into a power of two and a factor: the matrices are scaled by the factors, q and k by the powers, which is
exact.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from opslot._base.jit import dot, downcast
from opslot._base.kernel_launch import KernelLauncher, cdiv, launch_concurrently
from opslot.ops._common.kernels.tiles import (
    as_tokens,
    load_plane,
    load_plane_transposed,
    load_scalars,
    load_segment,
    load_tokens,
    load_tokens_transposed,
    store_plane,
    store_plane_transposed,
    store_tokens,
    strides,
)
from opslot.ops.chunk_gated_delta_rule.kernels.call import CHUNK, DeltaRuleCall
from opslot.ops.chunk_gated_delta_rule.kernels.forward import recur
from opslot.ops.chunk_gated_delta_rule.kernels.pairs import norm_reciprocal, split_exponent, write_pairs
from opslot.ops.chunk_gated_delta_rule.kernels.segments import chain
from opslot.ops.chunk_gated_delta_rule.kernels.system import CUMULATED, QUERY, READ, SCALES, WRITE, System


@triton.jit(do_not_specialize=["segments"])
def dstates_kernel(
    q_ptr,
    k_ptr,
    written_ptr,
    dout_ptr,
    scales_ptr,
    inverse_ptr,
    within_ptr,
    cu_seqlens_ptr,
    first_chunk_ptr,
    dfinal_ptr,
    dstates_ptr,
    dv_ptr,
    dinitial_ptr,
    added_ptr,
    q_token,
    q_head,
    k_token,
    k_head,
    dout_token,
    dout_head,
    segments,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_DFINAL: tl.constexpr,
    WANT_DINITIAL: tl.constexpr,
    WANT_ADDED: tl.constexpr,
    KEYS_LAST: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The chunks of a document, or of a part of one, from the last to the first: dS' of the state that leaves each, dv.

    With WANT_ADDED, only what is added to the gradient of a state over the part.
    """
    sequence = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    dtype: tl.constexpr = k_ptr.dtype.element_ty
    i = tl.arange(0, CHUNK)
    row = tl.arange(0, BK)
    column = tl.program_id(1) * BV + tl.arange(0, BV)
    begin, end, first, count = load_segment(
        cu_seqlens_ptr, first_chunk_ptr, sequence // segments, sequence % segments, segments, CHUNK
    )
    # A tile takes shared memory from its load on, and with decays of channels k is not needed while `written` is.
    LATE: tl.constexpr = PER_CHANNEL and KEYS_LAST
    dstate = tl.zeros((BV, BK), dtype=tl.float32)
    if HAS_DFINAL:
        if SPLIT:
            dstate += load_plane(dfinal_ptr, tl.program_id(0), column, row, V, K)
        else:
            dstate += load_plane_transposed(dfinal_ptr, tl.program_id(0), row, column, K, V).to(tl.float32)
    for step in tl.range(0, count, num_stages=STAGES):
        start = begin + (count - 1 - step) * CHUNK
        index = (first + count - 1 - step) * HEADS + head
        held = downcast(dstate, dtype)
        if not LATE:
            k = load_tokens(k_ptr, start, end - start, head // GROUP, k_token, k_head, row, K, CHUNK)
        dout = load_tokens_transposed(dout_ptr, start, end - start, head, dout_token, dout_head, column, V, CHUNK)
        inverse = load_plane(inverse_ptr, index, i, i, CHUNK, CHUNK)
        within = load_plane(within_ptr, index, i, i, CHUNK, CHUNK)
        zeros = tl.zeros((BV, CHUNK), dtype=tl.float32)
        if PER_CHANNEL:
            written = load_tokens(written_ptr, start, end - start, head, HEADS * K, K, row, K, CHUNK)
            fade = tl.load(scales_ptr + index.to(tl.int64) * K + row, mask=row < K, other=0.0)[None, :]
            dresidual = dot(held, tl.trans(written), zeros)
        else:
            scales = scales_ptr + index.to(tl.int64) * (SCALES * CHUNK)
            reading = tl.load(scales + READ * CHUNK + i)
            writing = tl.load(scales + WRITE * CHUNK + i)
            asking = tl.load(scales + QUERY * CHUNK + i)
            fade = tl.exp(tl.load(scales + CUMULATED * CHUNK + CHUNK - 1))
            dresidual = dot(held, tl.trans(k), zeros) * writing[None, :]
        dresidual = dot(dout, within, dresidual)
        dv = dot(downcast(dresidual, dtype), inverse, zeros)
        if not WANT_ADDED:
            store_plane(dstates_ptr, held, index, column, row, V, K)
            store_tokens(dv_ptr, tl.trans(downcast(dv, dtype)), start, end - start, head, column, HEADS, V, CHUNK)
        if not PER_CHANNEL:
            dout = downcast(dout.to(tl.float32) * asking[None, :], dtype)
            dv *= reading[None, :]
        q = load_tokens(q_ptr, start, end - start, head // GROUP, q_token, q_head, row, K, CHUNK)
        if LATE:
            k = load_tokens(k_ptr, start, end - start, head // GROUP, k_token, k_head, row, K, CHUNK)
        dstate = dot(dout, q, dstate * fade)
        dstate = dot(downcast(-dv, dtype), k, dstate)
    if WANT_DINITIAL:
        store_plane_transposed(dinitial_ptr, dstate, tl.program_id(0), row, column, K, V)
    if WANT_ADDED:
        store_plane(added_ptr, dstate, tl.program_id(0), column, row, V, K)


@triton.jit
def load_scaled(
    ptr,
    start,
    length,
    head,
    token,
    head_stride,
    column,
    power,
    NORM: tl.constexpr,
    K: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """`load_tokens` of [T, heads, K], with NORM each multiplied by its power of two, which rounds nothing."""
    x = load_tokens(ptr, start, length, head, token, head_stride, column, K, CHUNK)
    if NORM:
        x = downcast(x.to(tl.float32) * power[:, None], ptr.dtype.element_ty)
    return x


@triton.jit
def gradients_kernel(
    q_ptr,
    k_ptr,
    beta_ptr,
    dout_ptr,
    start_ptr,
    length_ptr,
    scales_ptr,
    states_ptr,
    residual_ptr,
    dstates_ptr,
    dv_ptr,
    dwithin_ptr,
    dsystem_ptr,
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
    NORM: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dq and dk [T, K_heads, K], dbeta and dg [T, V_heads]: one program per chunk and key head."""
    KEY_HEADS: tl.constexpr = HEADS // GROUP
    key_head = tl.program_id(0) % KEY_HEADS
    chunk = tl.program_id(0) // KEY_HEADS
    start = tl.load(start_ptr + chunk)
    length = tl.load(length_ptr + chunk)
    if length > 0:
        dtype: tl.constexpr = k_ptr.dtype.element_ty
        # In float32, what cancels in the gradient of the decays is left out, which takes registers: gradients of other
        # heads, and the pair of a token with itself.
        EXACT: tl.constexpr = dtype == tl.float32
        i = tl.arange(0, CHUNK)
        row = tl.arange(0, BK)
        dq = tl.zeros((CHUNK, BK), dtype=tl.float32)
        dk = tl.zeros((CHUNK, BK), dtype=tl.float32)
        # Row dots of q with dq and of k with dk so far; what a head adds to them is the gradient of its decays.
        q_dots = tl.zeros((CHUNK,), dtype=tl.float32)
        k_dots = tl.zeros((CHUNK,), dtype=tl.float32)
        # From here q and k are scaled by their powers, and dq and dk are gradients of these (see the top).
        q_power, q_factor = norm_reciprocal(q_ptr, start, length, key_head, q_token, q_head, row, NORM, K, CHUNK)
        k_power, k_factor = norm_reciprocal(k_ptr, start, length, key_head, k_token, k_head, row, NORM, K, CHUNK)
        for member in tl.range(0, GROUP, num_stages=1):
            head = key_head * GROUP + member
            index = chunk * HEADS + head
            if EXACT:
                others_dq, others_dk, others_q_dots, others_k_dots = dq, dk, q_dots, k_dots
                dq, dk = tl.zeros_like(dq), tl.zeros_like(dk)
                q_dots, k_dots = tl.zeros_like(q_dots), tl.zeros_like(k_dots)
            scales = scales_ptr + index.to(tl.int64) * (SCALES * CHUNK)
            cumulated = tl.load(scales + CUMULATED * CHUNK + i)
            last = tl.load(scales + CUMULATED * CHUNK + CHUNK - 1)
            rate_power, rate_factor = split_exponent(load_scalars(beta_ptr, start, length, head, HEADS, CHUNK))
            k_rate = k_factor * rate_factor
            grown = tl.exp(cumulated)
            asking = q_factor * grown * scale
            reading = k_factor * grown
            written = tl.zeros((CHUNK, BK), dtype=tl.float32)
            # Decay of the state over the chunk.
            faded = tl.zeros((BV, BK), dtype=tl.float32)
            for first in tl.range(0, V, BV, num_stages=STAGES):
                column = first + tl.arange(0, BV)
                dout = load_tokens(dout_ptr, start, length, head, dout_token, dout_head, column, V, CHUNK)
                dv = load_tokens(dv_ptr, start, length, head, HEADS * V, V, column, V, CHUNK)
                residual = load_plane(residual_ptr, index, column, i, V, CHUNK)
                state = load_plane(states_ptr, index, column, row, V, K)
                dstate = load_plane(dstates_ptr, index, column, row, V, K)
                dq = dot(downcast(dout.to(tl.float32) * asking[:, None], dtype), state, dq)
                dk = dot(downcast(-dv.to(tl.float32) * reading[:, None], dtype), state, dk)
                written = dot(tl.trans(residual), dstate, written)
                faded += state.to(tl.float32) * dstate.to(tl.float32)
            written *= (k_rate * tl.exp(last - cumulated))[:, None]
            q = load_scaled(q_ptr, start, length, key_head, q_token, q_head, row, q_power, NORM, K, CHUNK)
            written_k = load_scaled(
                k_ptr, start, length, key_head, k_token, k_head, row, k_power * rate_power, True, K, CHUNK
            )
            of_state = tl.sum(written_k.to(tl.float32) * written) + tl.exp(last) * tl.sum(faded)
            dwithin = load_plane(dwithin_ptr, index, i, i, CHUNK, CHUNK)
            dwithin_turned = load_plane_transposed(dwithin_ptr, index, i, i, CHUNK, CHUNK)
            if EXACT:
                own = tl.sum(tl.where(i[:, None] == i[None, :], dwithin, 0.0), 1)
                dwithin = tl.where(i[:, None] == i[None, :], 0.0, dwithin)
                dwithin_turned = tl.where(i[:, None] == i[None, :], 0.0, dwithin_turned)
            dq = dot(dwithin, written_k, dq)
            dk = dot(load_plane(dsystem_ptr, index, i, i, CHUNK, CHUNK), written_k, dk)
            written = dot(dwithin_turned, q, written)
            k = load_scaled(k_ptr, start, length, key_head, k_token, k_head, row, k_power, NORM, K, CHUNK)
            written_within = dot(
                load_plane_transposed(dsystem_ptr, index, i, i, CHUNK, CHUNK),
                k,
                tl.zeros((CHUNK, BK), dtype=tl.float32),
            )
            q_added = tl.sum(q.to(tl.float32) * dq, 1) - q_dots
            q_dots += q_added
            # What a key reads decays until its token.
            k_added = tl.sum(k.to(tl.float32) * dk, 1) - k_dots
            # What it writes decays after its token: state, outputs and residuals of later tokens.
            written_added = tl.sum(k.to(tl.float32) * written, 1) + tl.sum(k.to(tl.float32) * written_within, 1)
            drate = written_added / rate_factor
            written_added *= rate_power
            dk += written * rate_power[:, None]
            dk += written_within * rate_power[:, None]
            k_dots += k_added + written_added
            dcumulated = q_added + k_added - written_added + tl.where(i == CHUNK - 1, of_state, 0.0)
            if EXACT:
                own_dots = own * tl.sum(q * k, 1)
                drate += own_dots / rate_factor
                dq += own[:, None] * written_k + others_dq
                dk += (own * rate_power)[:, None] * q + others_dk
                q_dots += own_dots * rate_power + others_q_dots
                k_dots += own_dots * rate_power + others_k_dots
            # A token's own log decay is part of its own and all later sums of the chunk.
            dg = tl.sum(tl.where(i[:, None] >= i[None, :], dcumulated[:, None], 0.0), 0)
            offset = (start + i).to(tl.int64) * HEADS + head
            tl.store(dg_ptr + offset, downcast(dg, dg_ptr.dtype.element_ty), mask=i < length)
            tl.store(dbeta_ptr + offset, downcast(drate, dbeta_ptr.dtype.element_ty), mask=i < length)
        if NORM:
            q = load_scaled(q_ptr, start, length, key_head, q_token, q_head, row, q_power, NORM, K, CHUNK)
            k = load_scaled(k_ptr, start, length, key_head, k_token, k_head, row, k_power, NORM, K, CHUNK)
            dq = (dq - q.to(tl.float32) * (q_factor * q_factor * q_dots)[:, None]) * q_power[:, None]
            dk = (dk - k.to(tl.float32) * (k_factor * k_factor * k_dots)[:, None]) * k_power[:, None]
        store_tokens(dq_ptr, dq, start, length, key_head, row, KEY_HEADS, K, CHUNK)
        store_tokens(dk_ptr, dk, start, length, key_head, row, KEY_HEADS, K, CHUNK)


_launch_dstates = KernelLauncher(dstates_kernel)
_launch_gradients = KernelLauncher(gradients_kernel)


def write_gradients(
    call: DeltaRuleCall,
    system: System,
    initial_state: Tensor | None,
    dout: Tensor,
    dfinal: Tensor | None,
    grads: tuple[Tensor, ...],
    dinitial: Tensor | None,
) -> None:
    """Fill `grads` of query, key, value, g and beta, and `dinitial` if it is wanted.

    Separate kernels for dq and dk take as long as one for both: on an H200, 0.14 and 0.35 ms instead of 0.47.
    """
    dq, dk, dv, dg, dbeta = grads
    dout = as_tokens(dout)
    plan = call.plan
    states, residual, dstates = recur_both_ways(call, system, initial_state, dout, dfinal, dv, dinitial)
    pairs = write_pairs(call, system.scales, dout, residual, dv)
    _launch_gradients(
        (call.per_chunk // call.group, 1, 1),
        (
            *(call.q, call.k, call.rate, dout, *call.chunks.table, system.scales),
            *(states, residual, dstates, dv, *pairs, dq, dk, dbeta, dg),
        ),
        strides(call.q, call.k, dout),
        (call.scale,),
        (*call.sizes, call.normalize, plan.key, plan.grad_block, CHUNK, plan.stages),
        plan.grad_warps,
    )


def recur_both_ways(
    call: DeltaRuleCall,
    system: System,
    initial_state: Tensor | None,
    dout: Tensor,
    dfinal: Tensor | None,
    dv: Tensor,
    dinitial: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Forward again, and back, which also fills `dv` and `dinitial`.

    Returns:
        The state that each chunk finds, u, and dS': `DeltaRuleCall.by_chunk` of [V, K], [V, 64] and [V, K].
    """
    initial = None if initial_state is None else initial_state.contiguous()
    last = None if dfinal is None else dfinal.contiguous()
    states, dstates = (call.by_chunk(call.value, call.key) for _ in range(2))
    residual = call.by_chunk(call.value, CHUNK)
    found, back = (states, residual, None), (dstates, dv)
    if call.segments == 1:
        # One step after the other in few programs: on an H200, 64 of 16 key and 32 value heads of 128.
        launch_concurrently(
            call.k.device,
            lambda: recur(call, system, initial, found),
            lambda: _launch(call, system, dout, last, back, dinitial),
        )
        return states, residual, dstates
    transition = recur(call, system, initial, found)
    assert transition is not None
    added = call.by_segment(call.value, call.key)
    _launch(call, system, dout, None, (None, None), None, added)
    starts = chain(call, transition, added, last, dinitial, backward=True)
    _launch(call, system, dout, starts, back, None)
    return states, residual, dstates


def _launch(
    call: DeltaRuleCall,
    system: System,
    dout: Tensor,
    dfinal: Tensor | None,
    by_chunk: tuple[Tensor | None, Tensor | None],
    dinitial: Tensor | None,
    added: Tensor | None = None,
) -> None:
    plan = call.plan
    wanted = (dfinal is not None, dinitial is not None, added is not None)
    _launch_dstates(
        (call.chunks.documents * call.segments * call.heads, cdiv(call.value, plan.state_block), 1),
        (
            *(system.q, system.k, system.written, dout, system.scales, system.inverse, system.within),
            *(*call.chunks.bounds, dfinal, *by_chunk, dinitial, added),
        ),
        strides(system.q, system.k, dout),
        (call.segments,),
        (
            *(call.heads, system.group, call.key, call.value),
            system.per_channel,
            call.segments > 1,
            *wanted,
            plan.keys_last,
            plan.key,
            plan.state_block,
            CHUNK,
            plan.stages,
        ),
        plan.state_warps,
    )
