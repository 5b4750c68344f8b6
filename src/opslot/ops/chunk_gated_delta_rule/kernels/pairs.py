"""The gradients of what pairs of tokens of a chunk contribute: dW = tril(dout u^T) and dA = -strictly_lower(dv u^T).

Where all channels have one decay, they are scaled by it, by norms and by b; see `backward.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from opslot._base.jit import dot
from opslot._base.kernel_launch import KernelLauncher
from opslot.ops._common.kernels.tiles import decay, load_plane, load_scalars, load_tokens, store_plane, strides
from opslot.ops.chunk_gated_delta_rule.kernels.call import CHUNK, DeltaRuleCall
from opslot.ops.chunk_gated_delta_rule.kernels.system import CUMULATED, SCALES


@triton.jit
def split_exponent(x):
    """A power of two and a factor, of 1 to 2 (negative for negative x), that multiply to x; 0 and 1 for x = 0."""
    bits = x.to(tl.uint32, bitcast=True)
    power = (bits & 0x7F800000).to(tl.float32, bitcast=True)
    return power, ((bits & 0x807FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)


@triton.jit
def norm_reciprocal(
    ptr, start, length, head, token, head_stride, column, NORM: tl.constexpr, K: tl.constexpr, CHUNK: tl.constexpr
):
    """The reciprocal norm of each token of [T, heads, K] as power and factor; ones without NORM."""
    power = tl.zeros((CHUNK,), dtype=tl.float32) + 1.0
    factor = power
    if NORM:
        x = load_tokens(ptr, start, length, head, token, head_stride, column, K, CHUNK).to(tl.float32)
        power, factor = split_exponent(tl.rsqrt(tl.sum(x * x, 1) + 1e-6))
    return power, factor


@triton.jit
def pairs_kernel(
    q_ptr,
    k_ptr,
    beta_ptr,
    dout_ptr,
    start_ptr,
    length_ptr,
    scales_ptr,
    residual_ptr,
    dv_ptr,
    dwithin_ptr,
    dsystem_ptr,
    q_token,
    q_head,
    k_token,
    k_head,
    dout_token,
    dout_head,
    scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    SCALED: tl.constexpr,
    NORM: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """dW and dA [chunks * V_heads, CHUNK, CHUNK]: one program per chunk and value head.

    Without SCALED, elements above the diagonal, and of dA on it, are not used.
    """
    index = tl.program_id(0)
    head = index % HEADS
    start = tl.load(start_ptr + index // HEADS)
    length = tl.load(length_ptr + index // HEADS)
    if length > 0:
        i = tl.arange(0, CHUNK)
        if SCALED:
            row = tl.arange(0, BK)
            _, q_factor = norm_reciprocal(q_ptr, start, length, head // GROUP, q_token, q_head, row, NORM, K, CHUNK)
            _, k_factor = norm_reciprocal(k_ptr, start, length, head // GROUP, k_token, k_head, row, NORM, K, CHUNK)
            _, rate_factor = split_exponent(load_scalars(beta_ptr, start, length, head, HEADS, CHUNK))
            cumulated = tl.load(scales_ptr + index.to(tl.int64) * (SCALES * CHUNK) + CUMULATED * CHUNK + i)
        dwithin = tl.zeros((CHUNK, CHUNK), dtype=tl.float32)
        dsystem = tl.zeros((CHUNK, CHUNK), dtype=tl.float32)
        for first in tl.range(0, V, BV, num_stages=2):
            column = first + tl.arange(0, BV)
            dout = load_tokens(dout_ptr, start, length, head, dout_token, dout_head, column, V, CHUNK)
            dv = load_tokens(dv_ptr, start, length, head, HEADS * V, V, column, V, CHUNK)
            residual = load_plane(residual_ptr, index, column, i, V, CHUNK)
            dwithin = dot(dout, residual, dwithin)
            dsystem = dot(dv, residual, dsystem)
        if SCALED:
            before = decay(cumulated, cumulated, i[:, None] >= i[None, :]) * (k_factor * rate_factor)[None, :]
            dwithin *= before * (q_factor * scale)[:, None]
            before = tl.where(i[:, None] > i[None, :], before, 0.0)
            dsystem *= before * k_factor[:, None]
        store_plane(dwithin_ptr, dwithin, index, i, i, CHUNK, CHUNK)
        store_plane(dsystem_ptr, -dsystem, index, i, i, CHUNK, CHUNK)


_launch_pairs = KernelLauncher(pairs_kernel)


def write_pairs(
    call: DeltaRuleCall, scales: Tensor | None, dout: Tensor, residual: Tensor, dv: Tensor
) -> tuple[Tensor, Tensor]:
    """dW and dA [chunks * V_heads, 64, 64], scaled if there are `scales` (see `System`)."""
    dwithin, dsystem = call.by_chunk(CHUNK, CHUNK), call.by_chunk(CHUNK, CHUNK)
    plan = call.plan
    _launch_pairs(
        (call.per_chunk, 1, 1),
        (call.q, call.k, call.rate, dout, *call.chunks.table, scales, residual, dv, dwithin, dsystem),
        strides(call.q, call.k, dout),
        (call.scale,),
        (*call.sizes, scales is not None, call.normalize, plan.key, plan.value_block, CHUNK),
        4,
    )
    return dwithin, dsystem
