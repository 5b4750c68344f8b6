"""What each chunk needs before any state arrives: its triangular system and its scores.

Per chunk of 64 tokens and value head, with G the cumulated log decay of the chunk's tokens, L_ij = exp(G_i - G_j) for
i >= j, b the writing rates, and q, k normalized if requested:

    A_ij = (k_i . k_j) L_ij b_j below the diagonal,  N = (I + A)^-1
    W_ij = scale (q_i . k_j) L_ij b_j

and per token, with r its norm's reciprocal (1 without normalization), the scales of the rows of k and q, which the
other kernels read as they are: exp(G) r of a key that is read with, b exp(G_last - G) r of one that is written with,
scale exp(G) r of a query. No exponent is positive, since log decays are <= 0.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from opslot._base.jit import dot, downcast
from opslot.ops._common.triton import KernelLauncher
from opslot.ops.chunk_gated_delta_rule.kernels.call import Call, strides
from opslot.ops.chunk_gated_delta_rule.kernels.chunks import CHUNK
from opslot.ops.chunk_gated_delta_rule.kernels.tiles import FP32_DOT, decay, load_scalars, load_tokens, store_plane

# Rows of the scales of a chunk, [SCALES, CHUNK].
CUMULATED, READ, WRITE, QUERY = (tl.constexpr(n) for n in range(4))
SCALES = tl.constexpr(4)


@triton.jit
def diagonal_blocks(x, COUNT: tl.constexpr, SIZE: tl.constexpr):
    """[COUNT, SIZE, SIZE] of [COUNT SIZE, COUNT SIZE]."""
    p = tl.arange(0, COUNT)
    kept = p[:, None, None, None] == p[None, None, :, None]
    return tl.sum(tl.where(kept, tl.reshape(x, (COUNT, SIZE, COUNT, SIZE)), 0.0), 2)


@triton.jit
def unit_inverses(below, COUNT: tl.constexpr, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """(I + below)^-1 of strictly lower blocks [COUNT, SIZE, SIZE], SIZE 16, by doubling the blocks that are known."""
    i = tl.arange(0, SIZE)[None, :, None]
    j = tl.arange(0, SIZE)[None, None, :]
    inverse = tl.where(i == j, 1.0, tl.where(i >> 1 == j >> 1, -below, 0.0))
    for level in tl.static_range(1, 4):
        corner = tl.where((i >> (level + 1) == j >> (level + 1)) & (i >> level != j >> level), below, 0.0)
        inverse -= tl.dot(inverse, tl.dot(corner, inverse, input_precision=PRECISION), input_precision=PRECISION)
    return inverse


@triton.jit
def merged_inverses(inverse, x, COUNT: tl.constexpr, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """Inverses of x's diagonal blocks of size 2 SIZE, [COUNT / 2, 2 SIZE, 2 SIZE], from those of size SIZE."""
    PAIRS: tl.constexpr = COUNT // 2
    both = diagonal_blocks(x, PAIRS, 2 * SIZE)
    blocks = tl.reshape(both, (PAIRS, 2, SIZE, 2, SIZE))
    a = tl.arange(0, 2)
    later = a[None, :, None, None, None] == 1
    first = a[None, None, None, :, None] == 0
    corner = tl.sum(tl.sum(tl.where(later & first, blocks, 0.0), 3), 1)
    halves = tl.reshape(inverse, (PAIRS, 2, SIZE, SIZE))
    upper = tl.sum(tl.where(a[None, :, None, None] == 0, halves, 0.0), 1)
    lower = tl.sum(tl.where(a[None, :, None, None] == 1, halves, 0.0), 1)
    solved = -tl.dot(lower, tl.dot(corner, upper, input_precision=PRECISION), input_precision=PRECISION)
    same = a[None, :, None, None, None] == a[None, None, None, :, None]
    solved = tl.where(later & first, tl.reshape(solved, (PAIRS, 1, SIZE, 1, SIZE)), 0.0)
    merged = tl.where(same, tl.reshape(inverse, (PAIRS, 2, SIZE, 1, SIZE)), solved)
    return tl.reshape(merged, (PAIRS, 2 * SIZE, 2 * SIZE))


@triton.jit
def system_kernel(
    q_ptr,
    k_ptr,
    g_ptr,
    beta_ptr,
    start_ptr,
    length_ptr,
    scales_ptr,
    inverse_ptr,
    within_ptr,
    q_token,
    q_head,
    k_token,
    k_head,
    scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    NORM: tl.constexpr,
    BK: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Scales [chunks * V_heads, SCALES, CHUNK], N and W [chunks * V_heads, CHUNK, CHUNK]."""
    program = tl.program_id(0)
    start = tl.load(start_ptr + program // HEADS)
    length = tl.load(length_ptr + program // HEADS)
    if length > 0:
        head = program % HEADS
        i = tl.arange(0, CHUNK)
        system = tl.zeros((CHUNK, CHUNK), dtype=tl.float32)
        within = tl.zeros((CHUNK, CHUNK), dtype=tl.float32)
        k_squares = tl.zeros((CHUNK,), dtype=tl.float32)
        q_squares = tl.zeros((CHUNK,), dtype=tl.float32)
        for first in tl.static_range(0, K, BK):
            column = first + tl.arange(0, BK)
            q = load_tokens(q_ptr, start, length, head // GROUP, q_token, q_head, column, K, CHUNK)
            k = load_tokens(k_ptr, start, length, head // GROUP, k_token, k_head, column, K, CHUNK)
            system = dot(k, tl.trans(k), system)
            within = dot(q, tl.trans(k), within)
            if NORM:
                k_squares += tl.sum(k.to(tl.float32) * k.to(tl.float32), 1)
                q_squares += tl.sum(q.to(tl.float32) * q.to(tl.float32), 1)
        q_scale = k_squares + 1.0
        k_scale = k_squares + 1.0
        if NORM:
            q_scale = tl.rsqrt(q_squares + 1e-6)
            k_scale = tl.rsqrt(k_squares + 1e-6)
        q_scale *= scale
        g = load_scalars(g_ptr, start, length, head, HEADS, CHUNK)
        rate = load_scalars(beta_ptr, start, length, head, HEADS, CHUNK) * k_scale
        cumulated = tl.cumsum(g, 0)
        last = tl.sum(g)
        scales = scales_ptr + program.to(tl.int64) * (SCALES * CHUNK) + i
        tl.store(scales + CUMULATED * CHUNK, cumulated)
        tl.store(scales + READ * CHUNK, k_scale * tl.exp(cumulated))
        tl.store(scales + WRITE * CHUNK, rate * tl.exp(last - cumulated))
        tl.store(scales + QUERY * CHUNK, q_scale * tl.exp(cumulated))
        between = decay(cumulated, cumulated, i[:, None] >= i[None, :]) * rate[None, :]
        store_plane(within_ptr, within * between * q_scale[:, None], program, i, i, CHUNK, CHUNK)
        system *= tl.where(i[:, None] > i[None, :], between, 0.0) * k_scale[:, None]
        SIZE: tl.constexpr = 16
        inverse = unit_inverses(diagonal_blocks(system, 4, SIZE), 4, SIZE, PRECISION)
        inverse = merged_inverses(inverse, system, 4, SIZE, PRECISION)
        inverse = tl.reshape(merged_inverses(inverse, system, 2, 2 * SIZE, PRECISION), (CHUNK, CHUNK))
        store_plane(inverse_ptr, inverse, program, i, i, CHUNK, CHUNK)


_launch_system = KernelLauncher(system_kernel)


def solve(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """The scales, N and W of every chunk and value head; the scales in float32."""
    scales = call.by_chunk(SCALES.value, CHUNK, dtype=torch.float32)
    inverse, within = (call.by_chunk(CHUNK, CHUNK) for _ in range(2))
    # N is rounded to bf16; tf32 operands are precise enough for that.
    precision = "tf32" if call.k.dtype == torch.bfloat16 and not torch.version.hip else FP32_DOT.value
    _launch_system(
        (call.per_chunk, 1, 1),
        (call.q, call.k, call.log_decay, call.rate, call.chunks.start, call.chunks.length, scales, inverse, within),
        strides(call.q, call.k),
        (call.scale,),
        (call.heads, call.group, call.key, call.normalize, call.plan.key_block, CHUNK, precision),
        4,
    )
    return scales, inverse, within
