"""The gradients of query, key, g and beta in the variant per_channel.

With the symbols of `channels.py` and `backward.py`, dW = tril(dout u^T), dA = -strictly_lower(dv u^T), and the product
rule gives the rest, channel by channel. dW and dA are rounded once, and for each size of blocks so are the rows q and k
and the columns b k with their decays. What a pair of tokens i and j adds to the gradient of G_i and subtracts from that
of G_j comes from the same rounded values, so that it cancels in g's gradient before j and after i.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from opslot._base.jit import dot, downcast
from opslot._base.kernel_launch import KernelLauncher, cdiv
from opslot.ops._common.kernels.tiles import (
    as_tokens,
    load_plane,
    load_plane_transposed,
    load_scalars,
    load_tokens,
    store_tokens,
    strides,
)
from opslot.ops.chunk_gated_delta_rule.kernels.backward import recur_both_ways
from opslot.ops.chunk_gated_delta_rule.kernels.call import CHUNK, DeltaRuleCall
from opslot.ops.chunk_gated_delta_rule.kernels.channels import (
    LEVELS,
    ChannelSystem,
    halves_of_block,
    in_second_half,
    middle_of_block,
)
from opslot.ops.chunk_gated_delta_rule.kernels.pairs import write_pairs


@triton.jit(do_not_specialize=["dbeta_block"])
def channel_gradients_kernel(
    q_ptr,
    k_ptr,
    beta_ptr,
    dout_ptr,
    start_ptr,
    length_ptr,
    cumulated_ptr,
    norms_ptr,
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
    dbeta_block,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One program per chunk, key head and block of channels.

    dq and dk [T, K_heads, K] as if norms were constants, dg [T, HEADS, K], and the block's part of dbeta
    [blocks, T, HEADS].
    """
    KEY_HEADS: tl.constexpr = HEADS // GROUP
    key_head = tl.program_id(0) % KEY_HEADS
    chunk = tl.program_id(0) // KEY_HEADS
    start = tl.load(start_ptr + chunk)
    length = tl.load(length_ptr + chunk)
    dbeta_ptr += tl.program_id(1).to(tl.int64) * dbeta_block
    if length > 0:
        dtype: tl.constexpr = k_ptr.dtype.element_ty
        i = tl.arange(0, CHUNK)
        column = tl.program_id(1) * BK + tl.arange(0, BK)
        inside = column < K
        zeros = tl.zeros((CHUNK, BK), dtype=tl.float32)
        # Those of a key head's value heads are the same.
        norms = norms_ptr + (chunk * HEADS + key_head * GROUP).to(tl.int64) * (2 * CHUNK) + i
        q_norm = tl.load(norms)[:, None]
        k_norm = tl.load(norms + CHUNK)[:, None]
        q = load_tokens(q_ptr, start, length, key_head, q_token, q_head, column, K, CHUNK).to(tl.float32) * q_norm
        k = load_tokens(k_ptr, start, length, key_head, k_token, k_head, column, K, CHUNK).to(tl.float32) * k_norm
        dq = zeros
        dk = zeros
        for member in tl.range(0, GROUP, num_stages=1):
            head = key_head * GROUP + member
            index = chunk * HEADS + head
            rate = load_scalars(beta_ptr, start, length, head, HEADS, CHUNK)[:, None]
            cumulated = load_plane(cumulated_ptr, index, i, column, CHUNK, K)
            of_last = cumulated_ptr + (index.to(tl.int64) * CHUNK + CHUNK - 1) * K + column
            last = tl.load(of_last, mask=inside, other=0.0)
            asked = zeros
            read = zeros
            written = zeros
            # Decay of the state over the chunk.
            faded = tl.zeros((BK,), dtype=tl.float32)
            for first in tl.range(0, V, BV, num_stages=2):
                row = first + tl.arange(0, BV)
                dout = load_tokens(dout_ptr, start, length, head, dout_token, dout_head, row, V, CHUNK)
                dv = load_tokens(dv_ptr, start, length, head, HEADS * V, V, row, V, CHUNK)
                residual = load_plane_transposed(residual_ptr, index, row, i, V, CHUNK)
                state = load_plane(states_ptr, index, row, column, V, K)
                dstate = load_plane(dstates_ptr, index, row, column, V, K)
                asked = dot(dout, state, asked)
                read = dot(dv, state, read)
                written = dot(residual, dstate, written)
                faded += tl.sum(state.to(tl.float32) * dstate.to(tl.float32), 0)
            grown = tl.exp(cumulated)
            asked *= grown
            read *= -grown
            written *= tl.exp(last[None, :] - cumulated)
            dq += asked
            dk += read + rate * written
            to_state = k * written
            drate = tl.sum(to_state, 1)
            to_state *= rate
            dcumulated = q * asked + k * read - to_state
            dlast = tl.sum(to_state, 0) + tl.exp(last) * faded
            for level in tl.range(0, LEVELS, num_stages=1):
                middle = load_plane(cumulated_ptr, index, middle_of_block(i, level), column, CHUNK, K)
                second = in_second_half(i, level)[:, None]
                between = tl.exp(tl.where(second, cumulated - middle, middle - cumulated))
                columns = downcast(k * rate * between, dtype)
                rows = downcast(q * between, dtype)
                kept = halves_of_block(i[:, None], i[None, :], level)
                turned = halves_of_block(i[None, :], i[:, None], level)
                pairs = tl.where(kept, load_plane(dwithin_ptr, index, i, i, CHUNK, CHUNK), 0.0)
                of_rows = dot(pairs, columns, zeros)
                pairs = tl.where(turned, load_plane_transposed(dwithin_ptr, index, i, i, CHUNK, CHUNK), 0.0)
                of_columns = dot(pairs, rows, zeros)
                dcumulated += rows.to(tl.float32) * of_rows
                dq += of_rows * between
                rows = downcast(k * between, dtype)
                pairs = tl.where(kept, load_plane(dsystem_ptr, index, i, i, CHUNK, CHUNK), 0.0)
                of_rows = dot(pairs, columns, zeros)
                pairs = tl.where(turned, load_plane_transposed(dsystem_ptr, index, i, i, CHUNK, CHUNK), 0.0)
                of_columns = dot(pairs, rows, of_columns)
                dcumulated += rows.to(tl.float32) * of_rows - columns.to(tl.float32) * of_columns
                of_columns *= between
                dk += of_rows * between + of_columns * rate
                drate += tl.sum(k * of_columns, 1)
            # A token's own pair has no decay.
            own = tl.load(dwithin_ptr + (index.to(tl.int64) * CHUNK + i) * CHUNK + i).to(tl.float32)[:, None]
            dq += own * rate * k
            dk += own * rate * q
            drate += tl.sum(own * q * k, 1)
            # A token's own log decay is part of its own and all later sums of the chunk.
            dg = (tl.sum(dcumulated, 0) + dlast)[None, :] - tl.cumsum(dcumulated, 0) + dcumulated
            store_tokens(dg_ptr, dg, start, length, head, column, HEADS, K, CHUNK)
            tl.store(dbeta_ptr + (start + i).to(tl.int64) * HEADS + head, drate, mask=i < length)
        store_tokens(dq_ptr, dq * q_norm, start, length, key_head, column, KEY_HEADS, K, CHUNK)
        store_tokens(dk_ptr, dk * k_norm, start, length, key_head, column, KEY_HEADS, K, CHUNK)


@triton.jit(do_not_specialize=["rows"])
def project_kernel(
    x_ptr,
    given_ptr,
    grad_ptr,
    token,
    head_stride,
    rows,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The gradient of x [rows = T * HEADS, K] before it is divided by its norm, from that with a constant norm."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BK)
    inside = (row < rows)[:, None] & (column < K)[None, :]
    source = (row // HEADS * token + row % HEADS * head_stride)[:, None] + column[None, :]
    target = row[:, None] * K + column[None, :]
    x = tl.load(x_ptr + source, mask=inside, other=0.0).to(tl.float32)
    given = tl.load(given_ptr + target, mask=inside, other=0.0)
    along = tl.sum(x * given, 1) / (tl.sum(x * x, 1) + 1e-6)
    grad = given - x * along[:, None]
    tl.store(grad_ptr + target, downcast(grad, grad_ptr.dtype.element_ty), mask=inside)


_launch_gradients = KernelLauncher(channel_gradients_kernel)
_launch_project = KernelLauncher(project_kernel)


def write_channel_gradients(
    call: DeltaRuleCall,
    system: ChannelSystem,
    initial_state: Tensor | None,
    dout: Tensor,
    dfinal: Tensor | None,
    grads: tuple[Tensor, ...],
    dinitial: Tensor | None,
) -> None:
    """Fill `grads` of query, key, value, g and beta, and `dinitial` if it is wanted."""
    dq, dk, dv, dg, dbeta = grads
    dout = as_tokens(dout)
    plan = call.plan
    states, residual, dstates = recur_both_ways(call, system, initial_state, dout, dfinal, dv, dinitial)
    pairs = write_pairs(call, None, dout, residual, dv)
    blocks = cdiv(call.key, plan.key_block)
    parts = dbeta.new_empty((blocks, *call.rate.shape), dtype=torch.float32)
    given = [torch.empty_like(x, dtype=torch.float32) if call.normalize else x for x in (dq, dk)]
    _launch_gradients(
        (call.per_chunk // call.group, blocks, 1),
        (
            *(call.q, call.k, call.rate, dout, *call.chunks.table, system.cumulated, system.norms),
            *(states, residual, dstates, dv, *pairs, *given, parts, dg),
        ),
        strides(call.q, call.k, dout),
        (call.rate.numel(),),
        (*call.sizes, plan.key_block, plan.value_block, CHUNK),
        plan.channel_warps,
    )
    dbeta.copy_(parts.sum(0).view(dbeta.shape))
    if call.normalize:
        for x, of_constant_norm, grad in ((call.q, given[0], dq), (call.k, given[1], dk)):
            _project(x, of_constant_norm, grad)


def _project(x: Tensor, given: Tensor, grad: Tensor) -> None:
    tokens, heads, width = x.shape
    columns = max(16, triton.next_power_of_2(width))
    rows = max(1, 2048 // columns)
    _launch_project(
        (cdiv(tokens * heads, rows), 1, 1),
        (x, given, grad),
        strides(x),
        (tokens * heads,),
        (heads, width, columns, rows),
        4,
    )
