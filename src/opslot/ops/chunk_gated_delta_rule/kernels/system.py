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

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from opslot._base.jit import dot, downcast
from opslot.ops._common.triton import KernelLauncher
from opslot.ops.chunk_gated_delta_rule.kernels.call import Call, strides
from opslot.ops.chunk_gated_delta_rule.kernels.chunks import CHUNK
from opslot.ops.chunk_gated_delta_rule.kernels.tiles import dot_fp32, load_scalars, load_tokens

# Rows of the scales of a chunk, [SCALES, CHUNK].
CUMULATED, READ, WRITE, QUERY = (tl.constexpr(n) for n in range(4))
SCALES = tl.constexpr(4)


@triton.jit
def unit_inverse(below, SIZE: tl.constexpr):
    """(I + below)^-1 of a strictly lower [SIZE, SIZE] block: inverses of diagonal blocks, twice as large each time."""
    i = tl.arange(0, SIZE)[:, None]
    j = tl.arange(0, SIZE)[None, :]
    inverse = tl.where(i == j, 1.0, tl.where(i >> 1 == j >> 1, -below, 0.0))
    zeros = tl.zeros((SIZE, SIZE), dtype=tl.float32)
    for level in tl.static_range(1, 4):
        if 2**level < SIZE:
            corner = tl.where((i >> (level + 1) == j >> (level + 1)) & (i >> level != j >> level), below, 0.0)
            inverse -= dot_fp32(inverse, dot_fp32(corner, inverse, zeros), zeros)
    return inverse


@triton.jit
@no_type_check  # Tuples grow in its unrolled loops.
def row_blocks(ptr, start, length, head, token_stride, head_stride, column, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """A chunk's rows in four blocks."""
    blocks = ()
    for r in tl.static_range(4):
        x = load_tokens(ptr, start + r * BLOCK, length - r * BLOCK, head, token_stride, head_stride, column, WIDTH, BLOCK)
        blocks = blocks + (x,)  # noqa: RUF005
    return blocks


@triton.jit
@no_type_check
def lower_dots(a, b, acc):
    """acc + a b^T for the blocks (r, c) of the lower triangle, at r (r + 1) / 2 + c."""
    dots = ()
    for r in tl.static_range(4):
        for c in tl.static_range(r + 1):
            dots = dots + (dot(a[r], tl.trans(b[c]), acc[r * (r + 1) // 2 + c]),)  # noqa: RUF005
    return dots


@triton.jit
@no_type_check
def add_squares(sums, blocks):
    added = ()
    for r in tl.static_range(4):
        x = blocks[r].to(tl.float32)
        added = added + (sums[r] + tl.sum(x * x, 1),)  # noqa: RUF005
    return added


@triton.jit
def store_blocks(ptr, blocks, program, BLOCK: tl.constexpr):
    """The lower triangle's blocks, and zeros above, into a plane of [planes, 4 BLOCK, 4 BLOCK]."""
    i = tl.arange(0, BLOCK)
    base = ptr + program.to(tl.int64) * (16 * BLOCK * BLOCK) + i[:, None] * (4 * BLOCK) + i[None, :]
    for r in tl.static_range(4):
        for c in tl.static_range(4):
            block = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
            if c <= r:
                block = blocks[r * (r + 1) // 2 + c]
            tl.store(base + r * BLOCK * 4 * BLOCK + c * BLOCK, downcast(block, ptr.dtype.element_ty))


@triton.jit
@no_type_check
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
):
    """Scales [chunks * V_heads, SCALES, CHUNK], N and W [chunks * V_heads, CHUNK, CHUNK], in four by four blocks."""
    BLOCK: tl.constexpr = CHUNK // 4
    program = tl.program_id(0)
    start = tl.load(start_ptr + program // HEADS)
    length = tl.load(length_ptr + program // HEADS)
    if length > 0:
        head = program % HEADS
        i = tl.arange(0, BLOCK)
        zeros = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
        none = tl.zeros((BLOCK,), dtype=tl.float32)
        dots = (zeros,) * 10
        k_squares = (none,) * 4
        for first in tl.static_range(0, K, BK):
            column = first + tl.arange(0, BK)
            keys = row_blocks(k_ptr, start, length, head // GROUP, k_token, k_head, column, K, BLOCK)
            dots = lower_dots(keys, keys, dots)
            k_squares = add_squares(k_squares, keys)
        cumulated, rates, k_scales = (), (), ()
        last = tl.sum(none)
        for r in tl.static_range(4):
            g = load_scalars(g_ptr, start + r * BLOCK, length - r * BLOCK, head, HEADS, BLOCK)
            rate = load_scalars(beta_ptr, start + r * BLOCK, length - r * BLOCK, head, HEADS, BLOCK)
            k_scale = tl.rsqrt(k_squares[r] + 1e-6) if NORM else none + 1.0
            cumulated = cumulated + (last + tl.cumsum(g, 0),)  # noqa: RUF005
            rates = rates + (rate * k_scale,)  # noqa: RUF005
            k_scales = k_scales + (k_scale,)  # noqa: RUF005
            last += tl.sum(g)
        below = ()
        for r in tl.static_range(4):
            for c in tl.static_range(r + 1):
                between = cumulated[r][:, None] - cumulated[c][None, :]
                if r == c:
                    between = tl.where(i[:, None] > i[None, :], between, float("-inf"))
                block = k_scales[r][:, None] * dots[r * (r + 1) // 2 + c] * rates[c][None, :] * tl.exp(between)
                below = below + (block,)  # noqa: RUF005
        solved = ()
        for r in tl.static_range(4):
            own = unit_inverse(below[r * (r + 1) // 2 + r], BLOCK)
            for c in tl.static_range(r):
                known = zeros
                for s in tl.static_range(c, r):
                    known = dot_fp32(below[r * (r + 1) // 2 + s], solved[s * (s + 1) // 2 + c], known)
                solved = solved + (dot_fp32(-own, known, zeros),)  # noqa: RUF005
            solved = solved + (own,)  # noqa: RUF005
        store_blocks(inverse_ptr, solved, program, BLOCK)

        dots = (zeros,) * 10
        q_squares = (none,) * 4
        for first in tl.static_range(0, K, BK):
            column = first + tl.arange(0, BK)
            queries = row_blocks(q_ptr, start, length, head // GROUP, q_token, q_head, column, K, BLOCK)
            keys = row_blocks(k_ptr, start, length, head // GROUP, k_token, k_head, column, K, BLOCK)
            dots = lower_dots(queries, keys, dots)
            q_squares = add_squares(q_squares, queries)
        within = ()
        for r in tl.static_range(4):
            q_scale = scale * tl.rsqrt(q_squares[r] + 1e-6) if NORM else none + scale
            for c in tl.static_range(r + 1):
                between = cumulated[r][:, None] - cumulated[c][None, :]
                if r == c:
                    between = tl.where(i[:, None] >= i[None, :], between, float("-inf"))
                block = q_scale[:, None] * dots[r * (r + 1) // 2 + c] * rates[c][None, :] * tl.exp(between)
                within = within + (block,)  # noqa: RUF005
            offset = program.to(tl.int64) * (SCALES * CHUNK) + r * BLOCK + i
            tl.store(scales_ptr + offset + CUMULATED * CHUNK, cumulated[r])
            tl.store(scales_ptr + offset + READ * CHUNK, k_scales[r] * tl.exp(cumulated[r]))
            tl.store(scales_ptr + offset + WRITE * CHUNK, rates[r] * tl.exp(last - cumulated[r]))
            tl.store(scales_ptr + offset + QUERY * CHUNK, q_scale * tl.exp(cumulated[r]))
        store_blocks(within_ptr, within, program, BLOCK)


_launch_system = KernelLauncher(system_kernel)


def solve(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """The scales, N and W of every chunk and value head; the scales in float32."""
    scales = call.by_chunk(SCALES.value, CHUNK, dtype=torch.float32)
    inverse, within = (call.by_chunk(CHUNK, CHUNK) for _ in range(2))
    _launch_system(
        (call.per_chunk, 1, 1),
        (call.q, call.k, call.log_decay, call.rate, call.chunks.start, call.chunks.length, scales, inverse, within),
        strides(call.q, call.k),
        (call.scale,),
        (call.heads, call.group, call.key, call.normalize, call.plan.key_block, CHUNK),
        1,
    )
    return scales, inverse, within
