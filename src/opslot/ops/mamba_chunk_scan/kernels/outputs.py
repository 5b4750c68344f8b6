"""The outputs of all chunks, from the states that arrive at them.

With the symbols of `states.py`: out = exp(G) C S^T + ((C B^T) * exp(G_i - G_j) for i >= j) d x + D x.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from opslot._base.jit import dot, downcast
from opslot._base.kernel_launch import KernelLauncher
from opslot.ops._common.kernels.tiles import decay, load_plane, load_tokens, store_tokens, strides
from opslot.ops.mamba_chunk_scan.kernels.call import ScanCall


@triton.jit
def outputs_kernel(
    x_ptr,
    B_ptr,
    C_ptr,
    D_ptr,
    start_ptr,
    length_ptr,
    step_ptr,
    cumulated_ptr,
    states_ptr,
    out_ptr,
    x_token,
    x_head,
    B_token,
    B_group,
    C_token,
    C_group,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    HAS_D: tl.constexpr,
    BP: tl.constexpr,
    BN: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """out [T, HEADS, P]: one program per chunk and head."""
    index = tl.program_id(0)
    head = index % HEADS
    start = tl.load(start_ptr + index // HEADS)
    length = tl.load(length_ptr + index // HEADS)
    if length > 0:
        dtype: tl.constexpr = x_ptr.dtype.element_ty
        i = tl.arange(0, CHUNK)
        row = tl.arange(0, BP)
        scores = tl.zeros((CHUNK, CHUNK), dtype=tl.float32)
        out = tl.zeros((CHUNK, BP), dtype=tl.float32)
        for first in tl.range(0, N, BN, num_stages=2):
            column = first + tl.arange(0, BN)
            b = load_tokens(B_ptr, start, length, head // GROUP, B_token, B_group, column, N, CHUNK)
            c = load_tokens(C_ptr, start, length, head // GROUP, C_token, C_group, column, N, CHUNK)
            state = load_plane(states_ptr, index, row, column, P, N)
            scores = dot(c, tl.trans(b), scores)
            out = dot(c, tl.trans(state), out)
        x = load_tokens(x_ptr, start, length, head, x_token, x_head, row, P, CHUNK)
        step = tl.load(step_ptr + index.to(tl.int64) * CHUNK + i)
        cumulated = tl.load(cumulated_ptr + index.to(tl.int64) * CHUNK + i)
        scores *= decay(cumulated, cumulated, i[:, None] >= i[None, :]) * step[None, :]
        out = dot(downcast(scores, dtype), x, out * tl.exp(cumulated)[:, None])
        if HAS_D:
            out += tl.load(D_ptr + head).to(tl.float32) * x.to(tl.float32)
        store_tokens(out_ptr, out, start, length, head, row, HEADS, P, CHUNK)


_launch_outputs = KernelLauncher(outputs_kernel)


def write_output(call: ScanCall, steps: tuple[Tensor, Tensor], states: Tensor, out: Tensor) -> None:
    """Fill `out` [B, S, heads, P]."""
    plan = call.plan
    _launch_outputs(
        (call.per_chunk, 1, 1),
        (call.x, call.B, call.C, call.D, *call.chunks.table, *steps, states, out),
        strides(call.x, call.B, call.C),
        (),
        (*call.sizes, call.D is not None, plan.head, plan.read, plan.chunk),
        plan.out_warps,
    )
