"""The states along each document, and their gradients back along it.

With G the cumulated log decay of a chunk's tokens, S [P, N] the state that arrives at it and d its step sizes
(Dao and Gu 2024, section 6):

    S' = exp(G_last) S + (d exp(G_last - G) x)^T B,   dS = exp(G_last) dS' + (exp(G) dout)^T C
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from opslot._base.jit import dot, downcast
from opslot._base.kernel_launch import KernelLauncher, cdiv
from opslot.ops._common.arguments import are_given
from opslot.ops._common.kernels.tiles import (
    load_plane,
    load_segment,
    load_tokens,
    load_tokens_transposed,
    store_plane,
    strides,
)
from opslot.ops.mamba_chunk_scan.kernels.call import ScanCall


@triton.jit
def states_kernel(
    tokens_ptr,
    keys_ptr,
    step_ptr,
    cumulated_ptr,
    cu_seqlens_ptr,
    first_chunk_ptr,
    given_ptr,
    states_ptr,
    end_ptr,
    tokens_token,
    tokens_head,
    keys_token,
    keys_head,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    BACKWARD: tl.constexpr,
    HAS_GIVEN: tl.constexpr,
    WANT_END: tl.constexpr,
    BP: tl.constexpr,
    BN: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The chunks of a document one after the other: writes S of each (backward: dS'), and S after the last.

    Tokens and keys are x and B, backward dout and C.
    """
    document = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    dtype: tl.constexpr = keys_ptr.dtype.element_ty
    i = tl.arange(0, CHUNK)
    row = tl.program_id(1) * BP + tl.arange(0, BP)
    column = tl.program_id(2) * BN + tl.arange(0, BN)
    begin, end, first, count = load_segment(cu_seqlens_ptr, first_chunk_ptr, document, 0, 1, CHUNK)
    state = tl.zeros((BP, BN), dtype=tl.float32)
    if HAS_GIVEN:
        state += load_plane(given_ptr, tl.program_id(0), row, column, P, N).to(tl.float32)
    for iteration in tl.range(0, count, num_stages=STAGES):
        chunk = count - 1 - iteration if BACKWARD else iteration
        start = begin + chunk * CHUNK
        index = (first + chunk) * HEADS + head
        tokens = load_tokens_transposed(tokens_ptr, start, end - start, head, tokens_token, tokens_head, row, P, CHUNK)
        keys = load_tokens(keys_ptr, start, end - start, head // GROUP, keys_token, keys_head, column, N, CHUNK)
        cumulated = tl.load(cumulated_ptr + index.to(tl.int64) * CHUNK + i)
        last = tl.load(cumulated_ptr + index.to(tl.int64) * CHUNK + CHUNK - 1)
        if BACKWARD:
            weight = tl.exp(cumulated)
        else:
            weight = tl.load(step_ptr + index.to(tl.int64) * CHUNK + i) * tl.exp(last - cumulated)
        store_plane(states_ptr, state, index, row, column, P, N)
        weighted = downcast(tokens.to(tl.float32) * weight[None, :], dtype)
        state = dot(weighted, keys, state * tl.exp(last))
    if WANT_END:
        store_plane(end_ptr, state, tl.program_id(0), row, column, P, N)


_launch_states = KernelLauncher(states_kernel)


def walk(
    call: ScanCall,
    tokens: Tensor,
    steps: tuple[Tensor, Tensor],
    given: Tensor | None,
    end: Tensor | None,
    backward: bool = False,
) -> Tensor:
    """S of each chunk, or dS' with `backward`, [chunks * heads, P, N]; fills `end` with what leaves each document.

    Args:
        tokens: x, or dout as tokens [T, heads, P].
        given: the states that arrive at the documents, or the gradients of those that leave them; zeros without.
    """
    plan = call.plan
    keys = call.C if backward else call.B
    states = call.by_chunk(call.head, call.state)
    _launch_states(
        (call.chunks.documents * call.heads, cdiv(call.head, plan.rows), cdiv(call.state, plan.columns)),
        (tokens, keys, *steps, *call.chunks.bounds, None if given is None else given.contiguous(), states, end),
        strides(tokens, keys),
        (),
        (*call.sizes, backward, *are_given(given, end), plan.rows, plan.columns, plan.chunk, plan.stages),
        plan.walk_warps,
    )
    return states
