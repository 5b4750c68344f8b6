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

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from opslot._base.jit import dot
from opslot._base.kernel_launch import KernelLauncher
from opslot.ops._common.kernels.tiles import FP32_DOT, decay, load_scalars, load_tokens, store_plane, strides
from opslot.ops.chunk_gated_delta_rule.kernels.call import CHUNK, DeltaRuleCall

# Rows of the scales of a chunk, [SCALES, CHUNK].
CUMULATED, READ, WRITE, QUERY = (tl.constexpr(n) for n in range(4))
SCALES = tl.constexpr(4)


@triton.jit
def unit_inverse(below, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """(I + below)^-1 of a strictly lower [SIZE, SIZE] matrix: inverses of diagonal blocks, twice as large each time."""
    i = tl.arange(0, SIZE)[:, None]
    j = tl.arange(0, SIZE)[None, :]
    inverse = tl.where(i == j, 1.0, tl.where(i >> 1 == j >> 1, -below, 0.0))
    for level in tl.static_range(1, 6):
        # The lower left quarter of each block of the next size.
        corner = tl.where((i ^ j) >> level == 1, -below, 0.0)
        added = tl.dot(corner, inverse, input_precision=PRECISION)
        inverse = tl.dot(inverse, added, inverse, input_precision=PRECISION)
    return inverse


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
    SOLVED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Scales [chunks * V_heads, SCALES, CHUNK], W and, unless it is SOLVED, N [chunks * V_heads, CHUNK, CHUNK]."""
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
            if not SOLVED:
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
        if not SOLVED:
            system *= tl.where(i[:, None] > i[None, :], between, 0.0) * k_scale[:, None]
            inverse = unit_inverse(system, CHUNK, PRECISION)
            store_plane(inverse_ptr, inverse, program, i, i, CHUNK, CHUNK)


_launch_system = KernelLauncher(system_kernel, max_registers=168)


@dataclass(frozen=True)
class System:
    """What the recurrence reads of all chunks.

    Attributes:
        q, k: the call's, or those of the variant per_channel with their decays, [T, V_heads, K].
        written: keys with their decay to the end of the chunk, [T, V_heads, K]; None where `scales` has the decays.
        group: value heads per head of q and k.
        scales: [chunks * V_heads, SCALES, CHUNK]; in the variant per_channel the decays of a state, [..., K].
        inverse, within: N and W, [chunks * V_heads, CHUNK, CHUNK].
    """

    q: Tensor
    k: Tensor
    written: Tensor | None
    group: int
    scales: Tensor
    inverse: Tensor
    within: Tensor

    @property
    def per_channel(self) -> bool:
        return self.written is not None


def inverse_precision(call: DeltaRuleCall) -> str:
    """N is rounded to bf16; tf32 operands are precise enough for that."""
    return "tf32" if call.k.dtype == torch.bfloat16 and not torch.version.hip else FP32_DOT.value


def solve(call: DeltaRuleCall, solution: Sequence[Tensor], *, solved: bool) -> System:
    """The system of all chunks and value heads; N, the first of its `solution`, is written unless it is `solved`.

    Its kernel takes 2.5 times as long with N as without on an H200, so backward reads N, which has 8 KiB per chunk and
    head in 16 bit.
    """
    inverse = solution[0]
    scales = call.by_chunk(SCALES.value, CHUNK, dtype=torch.float32)
    within = call.by_chunk(CHUNK, CHUNK)
    _launch_system(
        (call.per_chunk, 1, 1),
        (call.q, call.k, call.log_decay, call.rate, *call.chunks.table, scales, None if solved else inverse, within),
        strides(call.q, call.k),
        (call.scale,),
        (
            *(call.heads, call.group, call.key, call.normalize, call.plan.key_block, CHUNK),
            *(solved, inverse_precision(call)),
        ),
        4,
    )
    return System(call.q, call.k, None, call.group, scales, inverse, within)
