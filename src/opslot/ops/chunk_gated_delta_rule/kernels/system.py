"""Each chunk's triangular system, before any state arrives.

Per chunk of 64 tokens and value head, with G the cumulated log decay of the chunk's tokens, L_ij = exp(G_i - G_j) for
i >= j and b the writing rates (the WY form of arXiv 2406.06484):

    A_ij = b_i (k_i . k_j) L_ij below the diagonal,  M = (I + A)^-1
    reads = M (b exp(G) k),  writes = M (b v)

No exponent is positive, since log decays are <= 0.
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
from opslot.ops.chunk_gated_delta_rule.kernels.tiles import (
    COLUMN_STAGES,
    load_plane,
    load_scalars,
    load_tokens,
    store_plane,
)


@triton.jit
def _unit_inverses(b0, b1, b2, b3, SIZE: tl.constexpr):
    """(I + b)^-1 of four strictly lower [SIZE, SIZE] blocks, by forward substitution."""
    i = tl.arange(0, SIZE)
    below = tl.join(tl.join(b0, b1), tl.join(b2, b3))
    rows = i[:, None, None, None]
    columns = i[None, :, None, None]
    inverse = tl.where(rows == columns, 1.0, tl.zeros_like(below))
    for j in range(SIZE - 1):
        column = tl.sum(tl.where(columns == j, below, 0.0), 1, keep_dims=True)
        row = tl.sum(tl.where(rows == j, inverse, 0.0), 0, keep_dims=True)
        inverse -= column * row
    first, second = tl.split(inverse)
    i0, i1 = tl.split(first)
    i2, i3 = tl.split(second)
    return i0, i1, i2, i3


@triton.jit
@no_type_check  # Tuples grow in its unrolled loops.
def solve_kernel(
    k_ptr,
    g_ptr,
    beta_ptr,
    start_ptr,
    length_ptr,
    cumulated_ptr,
    inverse_ptr,
    k_token,
    k_head,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """G [chunks * V_heads, CHUNK] and M [chunks * V_heads, CHUNK, CHUNK], in four by four blocks."""
    BLOCK: tl.constexpr = CHUNK // 4
    program = tl.program_id(0)
    start = tl.load(start_ptr + program // HEADS)
    length = tl.load(length_ptr + program // HEADS)
    if length > 0:
        head = program % HEADS
        i = tl.arange(0, BLOCK)
        cumulated = ()
        passed = tl.sum(tl.zeros((BLOCK,), dtype=tl.float32))
        for r in tl.static_range(4):
            g = load_scalars(g_ptr, start + r * BLOCK, length - r * BLOCK, head, HEADS, BLOCK)
            total = passed + tl.cumsum(g, 0)
            passed += tl.sum(g)
            tl.store(cumulated_ptr + program.to(tl.int64) * CHUNK + r * BLOCK + i, total)
            cumulated = cumulated + (total,)  # noqa: RUF005
        # Blocks of the lower triangle, row after row: (r, c) at r (r + 1) / 2 + c.
        zeros = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
        dots = (zeros,) * 10
        for first in tl.static_range(0, K, BK):
            column = first + tl.arange(0, BK)
            keys = ()
            for r in tl.static_range(4):
                k = load_tokens(
                    k_ptr, start + r * BLOCK, length - r * BLOCK, head // GROUP, k_token, k_head, column, K, BLOCK
                )
                keys = keys + (k,)  # noqa: RUF005
            added = ()
            for r in tl.static_range(4):
                for c in tl.static_range(r + 1):
                    added = added + (dot(keys[r], tl.trans(keys[c]), dots[r * (r + 1) // 2 + c]),)  # noqa: RUF005
            dots = added
        below = ()
        for r in tl.static_range(4):
            rate = load_scalars(beta_ptr, start + r * BLOCK, length - r * BLOCK, head, HEADS, BLOCK)
            for c in tl.static_range(r + 1):
                between = cumulated[r][:, None] - cumulated[c][None, :]
                if r == c:
                    between = tl.where(i[:, None] > i[None, :], between, float("-inf"))
                block = rate[:, None] * dots[r * (r + 1) // 2 + c] * tl.exp(between)
                below = below + (block,)  # noqa: RUF005
        own = _unit_inverses(below[0], below[2], below[5], below[9], BLOCK)
        solved = ()
        for r in tl.static_range(4):
            for c in tl.static_range(r):
                known = zeros
                for s in tl.static_range(c, r):
                    known = dot(below[r * (r + 1) // 2 + s], solved[s * (s + 1) // 2 + c], known)
                solved = solved + (dot(-own[r], known, zeros),)  # noqa: RUF005
            solved = solved + (own[r],)  # noqa: RUF005
        base = inverse_ptr + program.to(tl.int64) * CHUNK * CHUNK + i[:, None] * CHUNK + i[None, :]
        for r in tl.static_range(4):
            for c in tl.static_range(4):
                block = zeros
                if c <= r:
                    block = solved[r * (r + 1) // 2 + c]
                tl.store(base + r * BLOCK * CHUNK + c * BLOCK, downcast(block, inverse_ptr.dtype.element_ty))


@triton.jit
def reads_writes_kernel(
    k_ptr,
    v_ptr,
    beta_ptr,
    start_ptr,
    length_ptr,
    cumulated_ptr,
    inverse_ptr,
    reads_ptr,
    writes_ptr,
    k_token,
    k_head,
    v_token,
    v_head,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """reads [chunks * V_heads, CHUNK, K] and writes [chunks * V_heads, CHUNK, V]."""
    program = tl.program_id(0)
    start = tl.load(start_ptr + program // HEADS)
    length = tl.load(length_ptr + program // HEADS)
    if length > 0:
        head = program % HEADS
        dtype: tl.constexpr = k_ptr.dtype.element_ty
        i = tl.arange(0, CHUNK)
        rate = load_scalars(beta_ptr, start, length, head, HEADS, CHUNK)
        cumulated = tl.load(cumulated_ptr + program.to(tl.int64) * CHUNK + i)
        inverse = load_plane(inverse_ptr, program, i, CHUNK, CHUNK).to(tl.float32)
        # The rates scale columns of M instead of rows of k and v.
        of_v = downcast(inverse * rate[None, :], dtype)
        of_k = downcast(inverse * (rate * tl.exp(cumulated))[None, :], dtype)
        for first in tl.range(0, V, BV, num_stages=COLUMN_STAGES):
            column = first + tl.arange(0, BV)
            v = load_tokens(v_ptr, start, length, head, v_token, v_head, column, V, CHUNK)
            writes = dot(of_v, v, tl.zeros((CHUNK, BV), dtype=tl.float32))
            store_plane(writes_ptr, writes, program, column, V, CHUNK)
        for first in tl.range(0, K, BK, num_stages=COLUMN_STAGES):
            column = first + tl.arange(0, BK)
            k = load_tokens(k_ptr, start, length, head // GROUP, k_token, k_head, column, K, CHUNK)
            reads = dot(of_k, k, tl.zeros((CHUNK, BK), dtype=tl.float32))
            store_plane(reads_ptr, reads, program, column, K, CHUNK)


_launch_solve = KernelLauncher(solve_kernel)
_launch_reads_writes = KernelLauncher(reads_writes_kernel)


def solve(call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """G, M, reads and writes of every chunk and value head; G in float32."""
    plan, table = call.plan, (call.chunks.start, call.chunks.length)
    cumulated = call.by_chunk(CHUNK, dtype=torch.float32)
    inverse = call.by_chunk(CHUNK, CHUNK)
    reads, writes = call.by_chunk(CHUNK, call.key), call.by_chunk(CHUNK, call.value)
    _launch_solve(
        (call.per_chunk, 1, 1),
        (call.k, call.log_decay, call.rate, *table, cumulated, inverse),
        strides(call.k),
        (),
        (call.heads, call.group, call.key, plan.key_block, CHUNK),
        1,
    )
    _launch_reads_writes(
        (call.per_chunk, 1, 1),
        (call.k, call.v, call.rate, *table, cumulated, inverse, reads, writes),
        strides(call.k, call.v),
        (),
        (*call.sizes, *call.blocks(plan.value_block)),
        4,
    )
    return cumulated, inverse, reads, writes
