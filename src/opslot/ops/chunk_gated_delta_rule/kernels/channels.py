"""`system.py` for the variant per_channel, where each channel of a key has its own decay.

With G [64, K] the cumulated log decay of a chunk's tokens, and q and k normalized if requested, q also scaled:

    A_ij = sum over channels of k_i k_j exp(G_i - G_j) b_j below the diagonal,  N = (I + A)^-1
    W_ij = sum over channels of q_i k_j exp(G_i - G_j) b_j

and the recurrence reads exp(G) q, exp(G) k and b exp(G_last - G) k.

exp(G_i) exp(-G_j) would overflow. Tokens i > j differ first in one bit of their positions in the chunk: i is in the
second half of a block of 2, 4, ... or 64 tokens, and j in the first. With m the last token of the first half,
exp(G_i - G_m) and exp(G_m - G_j) are at most 1. So there is a matmul for each size of blocks, of which the elements
whose tokens are not in the two halves of one block are dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from opslot._base.jit import dot, downcast
from opslot._base.kernel_launch import KernelLauncher
from opslot.ops._common.kernels.tiles import (
    load_plane,
    load_plane_transposed,
    load_scalars,
    load_tokens,
    load_tokens_transposed,
    store_plane,
    store_tokens,
    strides,
)
from opslot.ops.chunk_gated_delta_rule.kernels.call import CHUNK, DeltaRuleCall
from opslot.ops.chunk_gated_delta_rule.kernels.system import System, inverse_precision, unit_inverse

# Block sizes of 2 to CHUNK tokens.
LEVELS = tl.constexpr(CHUNK.bit_length() - 1)


@triton.jit
def middle_of_block(i, level):
    """The last token of the first half of the block of 2^(level + 1) tokens that has token `i`."""
    return (i >> (level + 1) << (level + 1)) + (1 << level) - 1


@triton.jit
def in_second_half(i, level):
    return (i >> level & 1) == 1


@triton.jit
def halves_of_block(i, j, level):
    """Whether tokens i and j are in the second and in the first half of one block."""
    return ((i ^ j) >> level == 1) & (i > j)


@triton.jit
def decays_kernel(
    q_ptr,
    k_ptr,
    g_ptr,
    beta_ptr,
    start_ptr,
    length_ptr,
    cumulated_ptr,
    norms_ptr,
    fade_ptr,
    asking_ptr,
    reading_ptr,
    writing_ptr,
    q_token,
    q_head,
    k_token,
    k_head,
    g_token,
    g_head,
    scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    NORM: tl.constexpr,
    BK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """G [chunks * HEADS, CHUNK, K], scales of q and k [.., 2, CHUNK], exp(G_last) [.., K], and [T, HEADS, K] that the
    recurrence reads.
    """
    index = tl.program_id(0)
    head = index % HEADS
    start = tl.load(start_ptr + index // HEADS)
    length = tl.load(length_ptr + index // HEADS)
    if length > 0:
        i = tl.arange(0, CHUNK)
        column = tl.arange(0, BK)
        g = load_tokens(g_ptr, start, length, head, g_token, g_head, column, K, CHUNK).to(tl.float32)
        cumulated = tl.cumsum(g, 0)
        last = tl.sum(tl.where((i == CHUNK - 1)[:, None], cumulated, 0.0), 0)
        store_plane(cumulated_ptr, cumulated, index, i, column, CHUNK, K)
        tl.store(fade_ptr + index.to(tl.int64) * K + column, tl.exp(last), mask=column < K)
        grown = tl.exp(cumulated)
        norms = norms_ptr + index.to(tl.int64) * (2 * CHUNK) + i
        q = load_tokens(q_ptr, start, length, head // GROUP, q_token, q_head, column, K, CHUNK).to(tl.float32)
        q_norm = tl.zeros((CHUNK,), dtype=tl.float32) + scale
        if NORM:
            q_norm *= tl.rsqrt(tl.sum(q * q, 1) + 1e-6)
        tl.store(norms, q_norm)
        store_tokens(asking_ptr, q * grown * q_norm[:, None], start, length, head, column, HEADS, K, CHUNK)
        k = load_tokens(k_ptr, start, length, head // GROUP, k_token, k_head, column, K, CHUNK).to(tl.float32)
        k_norm = tl.zeros((CHUNK,), dtype=tl.float32) + 1.0
        if NORM:
            k_norm = tl.rsqrt(tl.sum(k * k, 1) + 1e-6)
        tl.store(norms + CHUNK, k_norm)
        store_tokens(reading_ptr, k * grown * k_norm[:, None], start, length, head, column, HEADS, K, CHUNK)
        k *= tl.exp(last[None, :] - cumulated)
        rate = load_scalars(beta_ptr, start, length, head, HEADS, CHUNK) * k_norm
        store_tokens(writing_ptr, k * rate[:, None], start, length, head, column, HEADS, K, CHUNK)


@triton.jit
def channel_system_kernel(
    q_ptr,
    k_ptr,
    beta_ptr,
    start_ptr,
    length_ptr,
    cumulated_ptr,
    norms_ptr,
    inverse_ptr,
    within_ptr,
    q_token,
    q_head,
    k_token,
    k_head,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """N and W [chunks * V_heads, CHUNK, CHUNK]."""
    index = tl.program_id(0)
    head = index % HEADS
    start = tl.load(start_ptr + index // HEADS)
    length = tl.load(length_ptr + index // HEADS)
    if length > 0:
        dtype: tl.constexpr = k_ptr.dtype.element_ty
        i = tl.arange(0, CHUNK)
        norms = norms_ptr + index.to(tl.int64) * (2 * CHUNK) + i
        q_norm = tl.load(norms)
        k_norm = tl.load(norms + CHUNK)
        beta = load_scalars(beta_ptr, start, length, head, HEADS, CHUNK)
        system = tl.zeros((CHUNK, CHUNK), dtype=tl.float32)
        within = tl.zeros((CHUNK, CHUNK), dtype=tl.float32)
        diagonal = tl.zeros((CHUNK,), dtype=tl.float32)
        zeros = tl.zeros((CHUNK, CHUNK), dtype=tl.float32)
        for first in tl.range(0, K, BK, num_stages=1):
            column = first + tl.arange(0, BK)
            q = load_tokens(q_ptr, start, length, head // GROUP, q_token, q_head, column, K, CHUNK)
            q = q.to(tl.float32) * q_norm[:, None]
            k = load_tokens(k_ptr, start, length, head // GROUP, k_token, k_head, column, K, CHUNK)
            k = k.to(tl.float32) * k_norm[:, None]
            # Computed as they are multiplied, since a matmul must not read the transpose of a computed tile.
            turned = load_tokens_transposed(k_ptr, start, length, head // GROUP, k_token, k_head, column, K, CHUNK)
            turned = turned.to(tl.float32) * (k_norm * beta)[None, :]
            rows = load_plane(cumulated_ptr, index, i, column, CHUNK, K)
            columns = load_plane_transposed(cumulated_ptr, index, i, column, CHUNK, K)
            diagonal += tl.sum(q * k, 1)
            for level in tl.range(0, LEVELS, num_stages=1):
                middle = middle_of_block(i, level)
                after = rows - load_plane(cumulated_ptr, index, middle, column, CHUNK, K)
                before = load_plane_transposed(cumulated_ptr, index, middle, column, CHUNK, K) - columns
                # Other elements are not used, but are finite.
                after = tl.exp(tl.where(in_second_half(i, level)[:, None], after, float("-inf")))
                before = tl.exp(tl.where(in_second_half(i, level)[None, :], float("-inf"), before))
                kept = halves_of_block(i[:, None], i[None, :], level)
                written = downcast(turned * before, dtype)
                within += tl.where(kept, dot(downcast(q * after, dtype), written, zeros), 0.0)
                system += tl.where(kept, dot(downcast(k * after, dtype), written, zeros), 0.0)
        within += tl.where(i[:, None] == i[None, :], (diagonal * beta)[:, None], 0.0)
        store_plane(within_ptr, within, index, i, i, CHUNK, CHUNK)
        inverse = unit_inverse(system, CHUNK, PRECISION)
        store_plane(inverse_ptr, inverse, index, i, i, CHUNK, CHUNK)


_launch_decays = KernelLauncher(decays_kernel)
_launch_system = KernelLauncher(channel_system_kernel)


@dataclass(frozen=True)
class ChannelSystem(System):
    """What the gradients also read, in float32.

    Attributes:
        cumulated: G, [chunks * V_heads, CHUNK, K].
        norms: scales of q and k, [chunks * V_heads, 2, CHUNK].
    """

    cumulated: Tensor
    norms: Tensor


def solve_channels(call: DeltaRuleCall, solution: Sequence[Tensor], *, solved: bool) -> ChannelSystem:
    """The system of all chunks and value heads; its `solution`, N and W, is written unless it is `solved`.

    Their kernel takes a sixth of forward + backward on an H200, so backward does not launch it again.
    """
    inverse, within = solution
    plan = call.plan
    cumulated = call.by_chunk(CHUNK, call.key, dtype=torch.float32)
    norms = call.by_chunk(2, CHUNK, dtype=torch.float32)
    fade = call.by_chunk(call.key, dtype=torch.float32)
    asking, reading, writing = (call.k.new_empty((call.k.shape[0], call.heads, call.key)) for _ in range(3))
    _launch_decays(
        (call.per_chunk, 1, 1),
        (
            *(call.q, call.k, call.log_decay, call.rate, *call.chunks.table),
            *(cumulated, norms, fade, asking, reading, writing),
        ),
        strides(call.q, call.k, call.log_decay),
        (call.scale,),
        (call.heads, call.group, call.key, call.normalize, plan.key, CHUNK),
        8,
    )
    if not solved:
        _launch_system(
            (call.per_chunk, 1, 1),
            (call.q, call.k, call.rate, *call.chunks.table, cumulated, norms, inverse, within),
            strides(call.q, call.k),
            (),
            (call.heads, call.group, call.key, plan.key_block, CHUNK, inverse_precision(call)),
            plan.system_warps,
        )
    return ChannelSystem(asking, reading, writing, 1, fade, inverse, within, cumulated, norms)
