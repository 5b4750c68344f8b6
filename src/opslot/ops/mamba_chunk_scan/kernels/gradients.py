"""The gradients of all arguments.

With the symbols of `states.py`, from dout and the gradient dS' of the state that leaves a chunk, where
M_ij = exp(G_i - G_j) for i >= j and W = dout x^T:

    u = (C B^T * M)^T dout + exp(G_last - G) B dS'^T,                    dx = d u + D dout
    dC = sum over heads of exp(G) dout S + (W * M * d_j) B
    dB = sum over heads of d exp(G_last - G) x dS' + (W * M * d_j)^T C

and the product rule gives those of the decays. A token's pairs T = C B^T * M * W add to the gradient of its sum of log
decays where it reads, and d T is subtracted from it where it writes. These nearly cancel over a chunk, so both are sums
of the same T in fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from opslot._base.jit import dot, downcast
from opslot._base.kernel_launch import KernelLauncher, cdiv
from opslot.ops._common.arguments import are_given
from opslot.ops._common.kernels.tiles import decay, load_plane, load_tokens, store_tokens, strides
from opslot.ops._common.triton_activations import is_below_limit
from opslot.ops.mamba_chunk_scan.kernels.call import ScanCall
from opslot.ops.mamba_chunk_scan.kernels.steps import unlimited_step

# What the sums over tokens are gradients of: A, D and dt_bias.
_SUMS = 3


@triton.jit
def token_gradients_kernel(
    x_ptr,
    B_ptr,
    C_ptr,
    dout_ptr,
    dt_ptr,
    A_ptr,
    D_ptr,
    bias_ptr,
    start_ptr,
    length_ptr,
    step_ptr,
    cumulated_ptr,
    states_ptr,
    dstates_ptr,
    dx_ptr,
    ddt_ptr,
    sums_ptr,
    x_token,
    x_head,
    B_token,
    B_group,
    C_token,
    C_group,
    dout_token,
    dout_head,
    dt_token,
    low,
    high,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    HAS_D: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    BP: tl.constexpr,
    BN: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """dx [T, HEADS, P], ddt [T, HEADS] and a chunk's sums [chunks, 3, HEADS]: one program per chunk and head."""
    index = tl.program_id(0)
    head = index % HEADS
    chunk = index // HEADS
    start = tl.load(start_ptr + chunk)
    length = tl.load(length_ptr + chunk)
    sums_ptr += chunk.to(tl.int64) * 3 * HEADS + head
    if length == 0:
        tl.store(sums_ptr, 0.0)
        tl.store(sums_ptr + HEADS, 0.0)
        tl.store(sums_ptr + 2 * HEADS, 0.0)
    else:
        dtype: tl.constexpr = x_ptr.dtype.element_ty
        i = tl.arange(0, CHUNK)
        row = tl.arange(0, BP)
        step = tl.load(step_ptr + index.to(tl.int64) * CHUNK + i)
        cumulated = tl.load(cumulated_ptr + index.to(tl.int64) * CHUNK + i)
        last = tl.load(cumulated_ptr + index.to(tl.int64) * CHUNK + CHUNK - 1)
        # Rows are the tokens that write, columns those that read.
        scores = tl.zeros((CHUNK, CHUNK), dtype=tl.float32)
        du = tl.zeros((CHUNK, BP), dtype=tl.float32)
        read = tl.zeros((CHUNK, BP), dtype=tl.float32)
        # Decay of the state over the chunk.
        faded = tl.zeros((BP,), dtype=tl.float32)
        for first in tl.range(0, N, BN, num_stages=2):
            column = first + tl.arange(0, BN)
            b = load_tokens(B_ptr, start, length, head // GROUP, B_token, B_group, column, N, CHUNK)
            c = load_tokens(C_ptr, start, length, head // GROUP, C_token, C_group, column, N, CHUNK)
            state = load_plane(states_ptr, index, row, column, P, N)
            dstate = load_plane(dstates_ptr, index, row, column, P, N)
            scores = dot(b, tl.trans(c), scores)
            du = dot(b, tl.trans(dstate), du)
            read = dot(c, tl.trans(state), read)
            faded += tl.sum(state.to(tl.float32) * dstate.to(tl.float32), 1)
        x = load_tokens(x_ptr, start, length, head, x_token, x_head, row, P, CHUNK)
        dout = load_tokens(dout_ptr, start, length, head, dout_token, dout_head, row, P, CHUNK)
        from_state = tl.sum(read * dout.to(tl.float32), 1) * tl.exp(cumulated)
        du *= tl.exp(last - cumulated)[:, None]
        to_state = tl.sum(du * x.to(tl.float32), 1)
        kept = i[:, None] <= i[None, :]
        scores *= tl.exp(tl.where(kept, cumulated[None, :] - cumulated[:, None], float("-inf")))
        du = dot(downcast(scores, dtype), dout, du)
        pairs = dot(x, tl.trans(dout), tl.zeros((CHUNK, CHUNK), dtype=tl.float32)) * scores
        written = tl.sum(pairs, 1) + to_state
        dcumulated = tl.sum(pairs * step[:, None], 0) + from_state - written * step
        dlast = tl.sum(to_state * step) + tl.exp(last) * tl.sum(faded)
        # A token's own log decay is part of its own and all later sums of the chunk.
        dlog = tl.sum(tl.where(i[:, None] >= i[None, :], dcumulated[:, None], 0.0), 0) + dlast
        decay_rate = tl.load(A_ptr + head).to(tl.float32)
        ddt = written + decay_rate * dlog

        raw = tl.load(dt_ptr + (start + i).to(tl.int64) * dt_token + head, mask=i < length, other=0.0).to(tl.float32)
        if HAS_BIAS:
            raw += tl.load(bias_ptr + head).to(tl.float32)
        unlimited = unlimited_step(raw, SOFTPLUS)
        if SOFTPLUS:
            ddt *= 1.0 / (1.0 + tl.exp(-raw))
        ddt = tl.where((i < length) & is_below_limit(-unlimited, -low) & is_below_limit(unlimited, high), ddt, 0.0)
        target = (start + i).to(tl.int64) * HEADS + head
        tl.store(ddt_ptr + target, downcast(ddt, ddt_ptr.dtype.element_ty), mask=i < length)
        tl.store(sums_ptr, tl.sum(dlog * step))
        tl.store(sums_ptr + HEADS, tl.sum(tl.sum(x.to(tl.float32) * dout.to(tl.float32), 1)))
        tl.store(sums_ptr + 2 * HEADS, tl.sum(ddt))
        dx = du * step[:, None]
        if HAS_D:
            dx += tl.load(D_ptr + head).to(tl.float32) * dout.to(tl.float32)
        store_tokens(dx_ptr, dx, start, length, head, row, HEADS, P, CHUNK)


@triton.jit
def group_gradients_kernel(
    left_ptr,
    right_ptr,
    other_ptr,
    start_ptr,
    length_ptr,
    step_ptr,
    cumulated_ptr,
    states_ptr,
    grad_ptr,
    left_token,
    left_head,
    right_token,
    right_head,
    other_token,
    other_group,
    part_size,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    WRITES: tl.constexpr,
    PARTS: tl.constexpr,
    BP: tl.constexpr,
    BN: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dC [PARTS, T, groups, N], with WRITES dB, summed over the heads of a part of each group.

    Left, right, other and states are dout, x, B and S; with WRITES x, dout, C and dS'. One program per chunk, group and
    part.
    """
    GROUPS: tl.constexpr = HEADS // GROUP
    PER_PART: tl.constexpr = (GROUP + PARTS - 1) // PARTS
    part = tl.program_id(0) % PARTS
    group = tl.program_id(0) // PARTS % GROUPS
    chunk = tl.program_id(0) // (PARTS * GROUPS)
    start = tl.load(start_ptr + chunk)
    length = tl.load(length_ptr + chunk)
    if length > 0:
        dtype: tl.constexpr = other_ptr.dtype.element_ty
        i = tl.arange(0, CHUNK)
        row = tl.arange(0, BP)
        column = tl.program_id(1) * BN + tl.arange(0, BN)
        # Rows are the tokens whose gradient it is.
        pairs = tl.zeros((CHUNK, CHUNK), dtype=tl.float32)
        grad = tl.zeros((CHUNK, BN), dtype=tl.float32)
        for member in tl.range(part * PER_PART, tl.minimum((part + 1) * PER_PART, GROUP), num_stages=STAGES):
            head = group * GROUP + member
            index = chunk * HEADS + head
            left = load_tokens(left_ptr, start, length, head, left_token, left_head, row, P, CHUNK)
            right = load_tokens(right_ptr, start, length, head, right_token, right_head, row, P, CHUNK)
            state = load_plane(states_ptr, index, row, column, P, N)
            step = tl.load(step_ptr + index.to(tl.int64) * CHUNK + i)
            cumulated = tl.load(cumulated_ptr + index.to(tl.int64) * CHUNK + i)
            products = dot(left, tl.trans(right), tl.zeros((CHUNK, CHUNK), dtype=tl.float32))
            if WRITES:
                last = tl.load(cumulated_ptr + index.to(tl.int64) * CHUNK + CHUNK - 1)
                weight = step * tl.exp(last - cumulated)
                kept = i[:, None] <= i[None, :]
                between = tl.exp(tl.where(kept, cumulated[None, :] - cumulated[:, None], float("-inf")))
                pairs += products * between * step[:, None]
            else:
                weight = tl.exp(cumulated)
                pairs += products * decay(cumulated, cumulated, i[:, None] >= i[None, :]) * step[None, :]
            grad = dot(downcast(left.to(tl.float32) * weight[:, None], dtype), state, grad)
        other = load_tokens(other_ptr, start, length, group, other_token, other_group, column, N, CHUNK)
        grad = dot(downcast(pairs, dtype), other, grad)
        grad_ptr += part.to(tl.int64) * part_size
        store_tokens(grad_ptr, grad, start, length, group, column, GROUPS, N, CHUNK)


_launch_tokens = KernelLauncher(token_gradients_kernel)
_launch_groups = KernelLauncher(group_gradients_kernel)


def write_gradients(
    call: ScanCall,
    dout: Tensor,
    steps: tuple[Tensor, Tensor],
    states: Tensor,
    dstates: Tensor,
    grads: tuple[Tensor | None, ...],
) -> None:
    """Fill `grads` of x, dt, A, B, C, D and dt_bias; the last two may be None.

    Args:
        dout: [T, heads, P] as tokens.
        states: S of each chunk.
        dstates: dS' of each chunk.
    """
    dx, ddt, dA, dB, dC, dD, dbias = grads
    plan = call.plan
    sums = torch.empty(call.chunks.count, _SUMS, call.heads, dtype=torch.float32, device=dx.device)  # type: ignore[union-attr]
    _launch_tokens(
        (call.per_chunk, 1, 1),
        (
            *(call.x, call.B, call.C, dout, call.dt, call.A, call.D, call.dt_bias),
            *(*call.chunks.table, *steps, states, dstates, dx, ddt, sums),
        ),
        (*strides(call.x, call.B, call.C, dout), call.dt.stride(0)),
        call.limit,
        (*call.sizes, *are_given(call.D, call.dt_bias), call.softplus, plan.head, plan.read, plan.chunk),
        plan.token_warps,
    )
    for grad, total in zip((dA, dD, dbias), sums.sum(0), strict=True):
        if grad is not None:
            grad.copy_(total)
    _write_group_gradient(call, steps, (dout, call.x, call.B, states), dC, writes=False)
    _write_group_gradient(call, steps, (call.x, dout, call.C, dstates), dB, writes=True)


def _write_group_gradient(
    call: ScanCall,
    steps: tuple[Tensor, Tensor],
    given: tuple[Tensor, Tensor, Tensor, Tensor],
    grad: Tensor | None,
    writes: bool,
) -> None:
    """Fill `grad` of C, with `writes` of B; see the kernel for what is given."""
    assert grad is not None
    left, right, other, states = given
    plan, parts = call.plan, call.parts
    target = grad if parts == 1 else grad.new_empty((parts, *grad.shape), dtype=torch.float32)
    _launch_groups(
        (call.chunks.count * call.groups * parts, cdiv(call.state, plan.shared), 1),
        (left, right, other, *call.chunks.table, *steps, states, target),
        (*strides(left, right, other), grad.numel()),
        (),
        (*call.sizes, writes, parts, plan.head, plan.shared, plan.chunk, plan.stages),
        plan.shared_warps,
    )
    if parts > 1:
        grad.copy_(target.sum(0))
