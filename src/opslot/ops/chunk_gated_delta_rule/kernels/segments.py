"""Long documents in few heads: parts of a document in parallel.

The state that leaves a part is linear in the state S that finds it, transition S + added. A first pass over all parts
computes both; a chain over the parts of a document gives the state that finds each, from which the second pass starts.
The gradient dS of the state that finds a part is transition^T dS' + added in the same way.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from opslot._base.kernel_launch import KernelLauncher, cdiv
from opslot.ops._common.kernels.tiles import (
    dot_fp32,
    load_plane,
    load_plane_transposed,
    store_plane,
    store_plane_transposed,
)
from opslot.ops.chunk_gated_delta_rule.kernels.call import DeltaRuleCall


@triton.jit(do_not_specialize=["segments"])
def chain_kernel(
    transition_ptr,
    added_ptr,
    given_ptr,
    starts_ptr,
    end_ptr,
    segments,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BACKWARD: tl.constexpr,
    HAS_GIVEN: tl.constexpr,
    WANT_END: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """The state, or gradient, that finds each part, and the one that leaves the last; `given` finds the first."""
    document = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    row = tl.arange(0, BK)
    column = tl.program_id(1) * BV + tl.arange(0, BV)
    state = tl.zeros((BV, BK), dtype=tl.float32)
    if HAS_GIVEN:
        state += load_plane_transposed(given_ptr, tl.program_id(0), row, column, K, V).to(tl.float32)
    for step in tl.range(0, segments, num_stages=1):
        segment = segments - 1 - step if BACKWARD else step
        index = (document * segments + segment) * HEADS + head
        store_plane(starts_ptr, state, index, column, row, V, K)
        added = load_plane(added_ptr, index, column, row, V, K)
        # Stored transposed, as are the states.
        if BACKWARD:
            transition = load_plane_transposed(transition_ptr, index, row, row, K, K)
        else:
            transition = load_plane(transition_ptr, index, row, row, K, K)
        state = dot_fp32(state, transition, added)
    if WANT_END:
        store_plane_transposed(end_ptr, state, tl.program_id(0), row, column, K, V)


_launch_chain = KernelLauncher(chain_kernel)


def chain(
    call: DeltaRuleCall, transition: Tensor, added: Tensor, given: Tensor | None, end: Tensor | None, backward: bool
) -> Tensor:
    """What finds each part, [documents * segments * V_heads, V, K]; fills `end` with what leaves the last.

    Args:
        transition: [documents * segments * V_heads, K, K], transposed.
        added: [documents * segments * V_heads, V, K].
        given, end: [documents, V_heads, K, V].
        backward: from the last part to the first.
    """
    starts = call.by_segment(call.value, call.key)
    block = 16
    _launch_chain(
        (call.chunks.documents * call.heads, cdiv(call.value, block), 1),
        (transition, added, given, starts, end),
        (),
        (call.segments,),
        (call.heads, call.key, call.value, backward, given is not None, end is not None, call.plan.key, block),
        8,
    )
    return starts
