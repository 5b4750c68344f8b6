"""The states along each document, and the outputs.

With the symbols of `system.py` and S [K, V] the state that arrives at a chunk (Yang et al. 2024, section 3.3):

    correction d = writes - reads S
    S' = exp(G_last) S + (exp(G_last - G) k)^T d,  out = scale (exp(G) q S + (tril(q k^T) L) d)
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from opslot._base.jit import dot, downcast
from opslot.ops._common.triton import KernelLauncher, cdiv
from opslot.ops.chunk_gated_delta_rule.kernels.call import Call, strides
from opslot.ops.chunk_gated_delta_rule.kernels.chunks import CHUNK
from opslot.ops.chunk_gated_delta_rule.kernels.system import solve
from opslot.ops.chunk_gated_delta_rule.kernels.tiles import (
    COLUMN_STAGES,
    decay,
    load_plane,
    load_state,
    load_tokens,
    store_plane,
    store_state,
    store_tokens,
)


@triton.jit
def states_kernel(
    k_ptr,
    reads_ptr,
    writes_ptr,
    cumulated_ptr,
    cu_seqlens_ptr,
    first_chunk_ptr,
    initial_ptr,
    states_ptr,
    correction_ptr,
    final_ptr,
    k_token,
    k_head,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    WANT_FINAL: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A document's chunks one after the other: the state that each finds, its correction, and the last state."""
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
    state = tl.zeros((BK, BV), dtype=tl.float32)
    if HAS_INITIAL:
        state += load_state(initial_ptr, tl.program_id(0), row, column, K, V).to(tl.float32)
    for step in tl.range(0, count, num_stages=STAGES):
        start = begin + step * CHUNK
        index = (first + step) * HEADS + head
        held = downcast(state, dtype)
        store_state(states_ptr, state, index, row, column, K, V)
        k = load_tokens(k_ptr, start, end - start, head // GROUP, k_token, k_head, row, K, CHUNK)
        reads = load_plane(reads_ptr, index, row, K, CHUNK)
        writes = load_plane(writes_ptr, index, column, V, CHUNK).to(tl.float32)
        cumulated = tl.load(cumulated_ptr + index.to(tl.int64) * CHUNK + i)
        last = tl.load(cumulated_ptr + index.to(tl.int64) * CHUNK + CHUNK - 1)
        correction = writes - dot(reads, held, tl.zeros((CHUNK, BV), dtype=tl.float32))
        store_plane(correction_ptr, correction, index, column, V, CHUNK)
        kept = downcast(correction * tl.exp(last - cumulated)[:, None], dtype)
        state = dot(tl.trans(k), kept, state * tl.exp(last))
    if WANT_FINAL:
        store_state(final_ptr, state, tl.program_id(0), row, column, K, V)


@triton.jit
def output_kernel(
    q_ptr,
    k_ptr,
    start_ptr,
    length_ptr,
    cumulated_ptr,
    states_ptr,
    correction_ptr,
    out_ptr,
    q_token,
    q_head,
    k_token,
    k_head,
    scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """out [T, V_heads, V]."""
    program = tl.program_id(0)
    start = tl.load(start_ptr + program // HEADS)
    length = tl.load(length_ptr + program // HEADS)
    if length > 0:
        head = program % HEADS
        column = tl.program_id(1) * BV + tl.arange(0, BV)
        i = tl.arange(0, CHUNK)
        cumulated = tl.load(cumulated_ptr + program.to(tl.int64) * CHUNK + i)
        within = tl.zeros((CHUNK, CHUNK), dtype=tl.float32)
        out = tl.zeros((CHUNK, BV), dtype=tl.float32)
        for first in tl.range(0, K, BK, num_stages=COLUMN_STAGES):
            row = first + tl.arange(0, BK)
            q = load_tokens(q_ptr, start, length, head // GROUP, q_token, q_head, row, K, CHUNK)
            k = load_tokens(k_ptr, start, length, head // GROUP, k_token, k_head, row, K, CHUNK)
            state = load_state(states_ptr, program, row, column, K, V)
            within = dot(q, tl.trans(k), within)
            out = dot(q, state, out)
        within *= decay(cumulated, cumulated, i[:, None] >= i[None, :])
        correction = load_plane(correction_ptr, program, column, V, CHUNK)
        out = dot(downcast(within, q_ptr.dtype.element_ty), correction, out * tl.exp(cumulated)[:, None])
        store_tokens(out_ptr, out * scale, start, length, head, column, HEADS, V, CHUNK)


_launch_states = KernelLauncher(states_kernel)
_launch_output = KernelLauncher(output_kernel)


@dataclass(frozen=True)
class Recurrence:
    """What the outputs and all gradients are made of.

    Attributes:
        cumulated, inverse, reads, correction: G, M, reads and d, by chunk.
        states: [chunks * V_heads, K, V], the state that each chunk finds.
    """

    cumulated: Tensor
    inverse: Tensor
    reads: Tensor
    states: Tensor
    correction: Tensor


def recur(call: Call, initial_state: Tensor | None, final: Tensor | None = None) -> Recurrence:
    """Walk along the chunks of each document; the last states go to `final`, float32 [documents, V_heads, K, V]."""
    plan, chunks = call.plan, call.chunks
    cumulated, inverse, reads, writes = solve(call)
    states, correction = call.by_chunk(call.key, call.value), call.by_chunk(CHUNK, call.value)
    initial = None if initial_state is None else initial_state.contiguous()
    _launch_states(
        (chunks.documents * call.heads, cdiv(call.value, plan.state_block), 1),
        (call.k, reads, writes, cumulated, chunks.cu_seqlens, chunks.first, initial, states, correction, final),
        strides(call.k),
        (),
        (*call.sizes, initial is not None, final is not None, plan.key, plan.state_block, CHUNK, plan.stages),
        4,
    )
    return Recurrence(cumulated, inverse, reads, states, correction)


def write_output(call: Call, found: Recurrence, out: Tensor) -> None:
    chunks, block = call.chunks, call.plan.value_block
    _launch_output(
        (call.per_chunk, cdiv(call.value, block), 1),
        (call.q, call.k, chunks.start, chunks.length, found.cumulated, found.states, found.correction, out),
        strides(call.q, call.k),
        (call.scale,),
        (*call.sizes, *call.blocks(block)),
        4,
    )
