"""The states along each document, and the outputs.

With the symbols of `system.py` and S [K, V] the state that arrives at a chunk (Yang et al. 2024, section 3.3, with the
writing rates in the system's columns instead of its rows):

    residual u = N (v - exp(G) k S)
    S' = exp(G_last) S + (b exp(G_last - G) k)^T u,  out = scale exp(G) q S + W u

In the variant per_channel, `channels.py` gives exp(G) k, b exp(G_last - G) k and scale exp(G) q as tensors, and the
decay of a state has a value per row.

The kernel holds S transposed: the results of its matmuls are the left operands of the next ones as they lie in
registers.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from opslot._base.jit import dot, downcast
from opslot._base.kernel_launch import KernelLauncher, cdiv
from opslot.ops._common.kernels.tiles import (
    load_plane,
    load_plane_transposed,
    load_segment,
    load_tokens,
    load_tokens_transposed,
    store_plane,
    store_plane_transposed,
    store_tokens,
    strides,
)
from opslot.ops.chunk_gated_delta_rule.kernels.call import CHUNK, DeltaRuleCall
from opslot.ops.chunk_gated_delta_rule.kernels.segments import chain
from opslot.ops.chunk_gated_delta_rule.kernels.system import CUMULATED, QUERY, READ, SCALES, WRITE, System


@triton.jit(do_not_specialize=["segments"])
def states_kernel(
    q_ptr,
    k_ptr,
    written_ptr,
    v_ptr,
    scales_ptr,
    inverse_ptr,
    within_ptr,
    cu_seqlens_ptr,
    first_chunk_ptr,
    initial_ptr,
    states_ptr,
    residual_ptr,
    out_ptr,
    final_ptr,
    transition_ptr,
    added_ptr,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    segments,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    WANT_STATES: tl.constexpr,
    WANT_OUT: tl.constexpr,
    WANT_FINAL: tl.constexpr,
    WANT_LINEAR: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The chunks of a document, or of a part of one, one after the other.

    Writes the state that finds each chunk and its residual, or its output; and the last state. With WANT_LINEAR, only
    the linear map of states over the part: what is added to a state, and in further programs the transition.
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
    state = tl.zeros((BV, BK), dtype=tl.float32)
    v_end = end
    if WANT_LINEAR:
        VALUE_BLOCKS: tl.constexpr = (V + BV - 1) // BV
        if tl.program_id(1) >= VALUE_BLOCKS:
            column -= VALUE_BLOCKS * BV
            state += tl.where(column[:, None] == row[None, :], 1.0, 0.0)
            v_end = begin
    if HAS_INITIAL:
        if SPLIT:
            state += load_plane(initial_ptr, tl.program_id(0), column, row, V, K)
        else:
            state += load_plane_transposed(initial_ptr, tl.program_id(0), row, column, K, V).to(tl.float32)
    for step in tl.range(0, count, num_stages=STAGES):
        start = begin + step * CHUNK
        index = (first + step) * HEADS + head
        held = downcast(state, dtype)
        k = load_tokens(k_ptr, start, end - start, head // GROUP, k_token, k_head, row, K, CHUNK)
        v = load_tokens_transposed(v_ptr, start, v_end - start, head, v_token, v_head, column, V, CHUNK)
        inverse = load_plane_transposed(inverse_ptr, index, i, i, CHUNK, CHUNK)
        if PER_CHANNEL:
            written = load_tokens(written_ptr, start, end - start, head, HEADS * K, K, row, K, CHUNK)
            fade = tl.load(scales_ptr + index.to(tl.int64) * K + row, mask=row < K, other=0.0)[None, :]
        else:
            scales = scales_ptr + index.to(tl.int64) * (SCALES * CHUNK)
            reading = tl.load(scales + READ * CHUNK + i)
            writing = tl.load(scales + WRITE * CHUNK + i)
            fade = tl.exp(tl.load(scales + CUMULATED * CHUNK + CHUNK - 1))
        zeros = tl.zeros((BV, CHUNK), dtype=tl.float32)
        predicted = dot(held, tl.trans(k), zeros)
        if not PER_CHANNEL:
            predicted *= reading[None, :]
        residual = dot(v, inverse, zeros)
        residual = dot(downcast(-predicted, dtype), inverse, residual)
        if WANT_STATES:
            store_plane(states_ptr, held, index, column, row, V, K)
            store_plane(residual_ptr, residual, index, column, i, V, CHUNK)
        if WANT_OUT:
            q = load_tokens(q_ptr, start, end - start, head // GROUP, q_token, q_head, row, K, CHUNK)
            within = load_plane_transposed(within_ptr, index, i, i, CHUNK, CHUNK)
            asking = 1.0 if PER_CHANNEL else tl.load(scales + QUERY * CHUNK + i)[None, :]
            out = dot(held, tl.trans(q), zeros) * asking
            out = dot(downcast(residual, dtype), within, out)
            store_tokens(out_ptr, tl.trans(downcast(out, dtype)), start, end - start, head, column, HEADS, V, CHUNK)
        if PER_CHANNEL:
            state = dot(downcast(residual, dtype), written, state * fade)
        else:
            state = dot(downcast(residual * writing[None, :], dtype), k, state * fade)
    if WANT_FINAL:
        store_plane_transposed(final_ptr, state, tl.program_id(0), row, column, K, V)
    if WANT_LINEAR:
        if tl.program_id(1) < VALUE_BLOCKS:
            store_plane(added_ptr, state, tl.program_id(0), column, row, V, K)
        else:
            store_plane(transition_ptr, state, tl.program_id(0), column, row, K, K)


_launch_states = KernelLauncher(states_kernel)


def recur(
    call: DeltaRuleCall,
    system: System,
    initial_state: Tensor | None,
    by_chunk: tuple[Tensor | None, Tensor | None, Tensor | None],
    final: Tensor | None = None,
) -> Tensor | None:
    """Run the recurrence, in parts if documents are split; returns the parts' transitions.

    Args:
        by_chunk: filled; the state that each chunk finds [chunks * V_heads, V, K] and u [chunks * V_heads, V, 64], or
            the output [B, S, V_heads, V].
        final: filled with the last states, [documents, V_heads, K, V].
    """
    initial = None if initial_state is None else initial_state.contiguous()
    if call.segments == 1:
        _launch(call, system, initial, by_chunk, final)
        return None
    transition, added = call.by_segment(call.key, call.key), call.by_segment(call.value, call.key)
    _launch(call, system, None, (None, None, None), None, (transition, added))
    _launch(call, system, chain(call, transition, added, initial, final, backward=False), by_chunk, None)
    return transition


def _launch(
    call: DeltaRuleCall,
    system: System,
    initial: Tensor | None,
    by_chunk: tuple[Tensor | None, Tensor | None, Tensor | None],
    final: Tensor | None,
    linear: tuple[Tensor | None, Tensor | None] = (None, None),
) -> None:
    plan = call.plan
    columns = cdiv(call.value, plan.state_block)
    if linear[0] is not None:
        columns += cdiv(call.key, plan.state_block)
    wanted = (by_chunk[0] is not None, by_chunk[2] is not None, final is not None, linear[0] is not None)
    _launch_states(
        (call.chunks.documents * call.segments * call.heads, columns, 1),
        (
            *(system.q, system.k, system.written, call.v, system.scales, system.inverse, system.within),
            *(*call.chunks.bounds, initial, *by_chunk, final, *linear),
        ),
        strides(system.q, system.k, call.v),
        (call.segments,),
        (
            *(call.heads, system.group, call.key, call.value),
            system.per_channel,
            call.segments > 1,
            initial is not None,
            *wanted,
            plan.key,
            plan.state_block,
            CHUNK,
            plan.stages,
        ),
        plan.state_warps,
    )
