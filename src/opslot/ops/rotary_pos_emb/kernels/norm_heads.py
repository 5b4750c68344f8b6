"""RMSNorm of heads with their rotation, for the heads of one token, in Triton.

If all channels are rotated, the first and second channels of the pairs are two tiles. Otherwise all channels are one
tile, and the other channel of each pair is loaded again, from the L1 cache: tiles of different widths would get one
layout, which takes up to three times the registers. A norm that comes last has only the first form.
"""

from __future__ import annotations

import triton
import triton.language as tl

from opslot._base.jit import downcast
from opslot.ops.rotary_pos_emb.kernels.rotate import load_halves, rotate_pairs


@triton.jit
def _store_halves(row_ptr, first, second, inside, HALF: tl.constexpr, HALF_TILE: tl.constexpr):
    dtype: tl.constexpr = row_ptr.dtype.element_ty
    channel = tl.arange(0, HALF_TILE)[None, :]
    mask = inside & (channel < HALF)
    tl.store(row_ptr + channel, downcast(first, dtype), mask=mask)
    tl.store(row_ptr + HALF + channel, downcast(second, dtype), mask=mask)


@triton.jit
def _rounded(x, dtype: tl.constexpr, ROUND: tl.constexpr):
    if ROUND:
        x = downcast(x, dtype).to(tl.float32)
    return x


@triton.jit
def _weighted(x, rstd, weight, dtype: tl.constexpr, ROUND_BEFORE: tl.constexpr, ROUND_AFTER: tl.constexpr):
    """x * rstd * weight, rounded to `dtype` before and after the weight where Transformers does."""
    return _rounded(_rounded(x * rstd, dtype, ROUND_BEFORE) * weight, dtype, ROUND_AFTER)


@triton.jit
def _inverse_rms(squares, inside, eps, WIDTH: tl.constexpr):
    """1 / rms of rows with these sums of squares."""
    # With eps=0, rows past the end, which are zeros, would make the weight's gradient NaN.
    return tl.rsqrt(tl.where(inside, squares / WIDTH + eps, 1.0))


@triton.jit
def load_weight(weight_ptr, OFFSET: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """The weights of the first and second channels of each pair, or of all channels and the other one of their pair."""
    channel = tl.arange(0, TILE)[None, :]
    if WIDTH == 2 * HALF:
        first = tl.load(weight_ptr + channel, mask=channel < HALF, other=0.0).to(tl.float32)
        second = tl.load(weight_ptr + HALF + channel, mask=channel < HALF, other=0.0).to(tl.float32)
    else:
        first = tl.load(weight_ptr + channel, mask=channel < WIDTH, other=0.0).to(tl.float32)
        second = tl.load(weight_ptr + _other(channel, HALF), mask=channel < 2 * HALF, other=0.0).to(tl.float32)
    if OFFSET:
        first, second = first + 1.0, second + 1.0
    return first, second


@triton.jit
def _other(channel, HALF: tl.constexpr):
    """The other channel of each pair."""
    return tl.where(channel < HALF, channel + HALF, channel - HALF)


@triton.jit
def load_angles(
    cos_ptr,
    sin_ptr,
    INVERSE: tl.constexpr,
    STRIDE: tl.constexpr,
    HALF: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):
    """cos of the first and second channels of each pair and sin of both; or what multiplies all channels and others."""
    channel = tl.arange(0, TILE)[None, :]
    if WIDTH == 2 * HALF:
        inside = channel < HALF
        cos_first = tl.load(cos_ptr + channel * STRIDE, mask=inside, other=0.0).to(tl.float32)
        cos_second = tl.load(cos_ptr + (HALF + channel) * STRIDE, mask=inside, other=0.0).to(tl.float32)
        sin_first = tl.load(sin_ptr + channel * STRIDE, mask=inside, other=0.0).to(tl.float32)
        sin_second = tl.load(sin_ptr + (HALF + channel) * STRIDE, mask=inside, other=0.0).to(tl.float32)
        angles = cos_first, cos_second, sin_first, sin_second
    else:
        rotated = channel < 2 * HALF
        cos = tl.load(cos_ptr + channel * STRIDE, mask=rotated, other=1.0).to(tl.float32)
        if INVERSE:
            sin = tl.load(sin_ptr + _other(channel, HALF) * STRIDE, mask=rotated, other=0.0).to(tl.float32)
            sin = tl.where(channel < HALF, sin, -sin)
        else:
            sin = tl.load(sin_ptr + channel * STRIDE, mask=rotated, other=0.0).to(tl.float32)
            sin = tl.where(channel < HALF, -sin, sin)
        angles = cos, cos, sin, sin
    return angles


@triton.jit
def forward_halves(
    x_ptr,
    out_ptr,
    weight,
    angles,
    inside,
    eps,
    WEIGHT_DTYPE: tl.constexpr,
    CAST_LAST: tl.constexpr,
    NORM_LAST: tl.constexpr,
    KEEPS_DTYPE: tl.constexpr,
    HALF: tl.constexpr,
    HALF_TILE: tl.constexpr,
):
    """Heads at `x_ptr` [HEADS, 1] whose channels are all rotated."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    SAME: tl.constexpr = dtype == WEIGHT_DTYPE
    first, second = load_halves(x_ptr, inside, HALF, HALF_TILE)
    weight_first, weight_second = weight
    if NORM_LAST:
        first, second = rotate_pairs(first, second, angles, False)
        first, second = _rounded(first, dtype, KEEPS_DTYPE), _rounded(second, dtype, KEEPS_DTYPE)
    rstd = _inverse_rms(tl.sum(first * first + second * second, axis=1, keep_dims=True), inside, eps, 2 * HALF)
    # Round where Transformers does, if the dtypes are the same.
    BEFORE: tl.constexpr = not CAST_LAST and SAME and (KEEPS_DTYPE or not NORM_LAST)
    AFTER: tl.constexpr = not NORM_LAST and (CAST_LAST or SAME)
    first = _weighted(first, rstd, weight_first, dtype, BEFORE, AFTER)
    second = _weighted(second, rstd, weight_second, dtype, BEFORE, AFTER)
    if not NORM_LAST:
        first, second = rotate_pairs(first, second, angles, False)
    _store_halves(out_ptr, first, second, inside, HALF, HALF_TILE)


@triton.jit
def forward_whole(
    x_ptr,
    out_ptr,
    weight,
    angles,
    inside,
    eps,
    WEIGHT_DTYPE: tl.constexpr,
    CAST_LAST: tl.constexpr,
    HALF: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):
    """Heads at `x_ptr` [HEADS, 1] whose first 2 * HALF channels are rotated after the norm."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    SAME: tl.constexpr = dtype == WEIGHT_DTYPE
    BEFORE: tl.constexpr = not CAST_LAST and SAME
    AFTER: tl.constexpr = CAST_LAST or SAME
    channel = tl.arange(0, TILE)[None, :]
    other, rotated = _other(channel, HALF), channel < 2 * HALF
    mask = inside & (channel < WIDTH)
    cos, _, sin, _ = angles
    x = tl.load(x_ptr + channel, mask=mask, other=0.0).to(tl.float32)
    x_other = tl.load(x_ptr + other, mask=inside & rotated, other=0.0).to(tl.float32)
    weight_channel, weight_other = weight
    rstd = _inverse_rms(tl.sum(x * x, axis=1, keep_dims=True), inside, eps, WIDTH)
    normed = _weighted(x, rstd, weight_channel, dtype, BEFORE, AFTER)
    normed_other = _weighted(x_other, rstd, weight_other, dtype, BEFORE, AFTER)
    out = normed * cos + normed_other * sin
    tl.store(out_ptr + channel, downcast(out, out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _backward_halves(
    dout_ptr,
    x_ptr,
    dx_ptr,
    weight,
    angles,
    inside,
    eps,
    NORM_LAST: tl.constexpr,
    KEEPS_DTYPE: tl.constexpr,
    NEED_X: tl.constexpr,
    HALF: tl.constexpr,
    HALF_TILE: tl.constexpr,
):
    """As `forward_halves`; returns what each head adds to the gradient of the weight's first and second half."""
    first, second = load_halves(x_ptr, inside, HALF, HALF_TILE)
    dfirst, dsecond = load_halves(dout_ptr, inside, HALF, HALF_TILE)
    weight_first, weight_second = weight
    if NORM_LAST:
        first, second = rotate_pairs(first, second, angles, False)
        dtype: tl.constexpr = x_ptr.dtype.element_ty
        first, second = _rounded(first, dtype, KEEPS_DTYPE), _rounded(second, dtype, KEEPS_DTYPE)
    else:
        dfirst, dsecond = rotate_pairs(dfirst, dsecond, angles, True)
    rstd = _inverse_rms(tl.sum(first * first + second * second, axis=1, keep_dims=True), inside, eps, 2 * HALF)
    first, second = first * rstd, second * rstd
    dweight_first, dweight_second = dfirst * first, dsecond * second
    if NEED_X:
        # d(normalized) * normalized = d(weight) * weight.
        product = dweight_first * weight_first + dweight_second * weight_second
        along = tl.sum(product, axis=1, keep_dims=True) / (2 * HALF)
        dfirst = rstd * (dfirst * weight_first - first * along)
        dsecond = rstd * (dsecond * weight_second - second * along)
        if NORM_LAST:
            dfirst, dsecond = rotate_pairs(dfirst, dsecond, angles, True)
        _store_halves(dx_ptr, dfirst, dsecond, inside, HALF, HALF_TILE)
    return dweight_first, dweight_second


@triton.jit
def _backward_whole(
    dout_ptr,
    x_ptr,
    dx_ptr,
    weight,
    angles,
    inside,
    eps,
    NEED_X: tl.constexpr,
    HALF: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):
    """As `forward_whole`; returns what each head adds to the gradient of the weight."""
    channel = tl.arange(0, TILE)[None, :]
    other, rotated = _other(channel, HALF), channel < 2 * HALF
    mask = inside & (channel < WIDTH)
    cos, _, sin, _ = angles
    x = tl.load(x_ptr + channel, mask=mask, other=0.0).to(tl.float32)
    dout = tl.load(dout_ptr + channel, mask=mask, other=0.0).to(tl.float32)
    dout_other = tl.load(dout_ptr + other, mask=inside & rotated, other=0.0).to(tl.float32)
    weight_channel, _ = weight
    dnormed = dout * cos + dout_other * sin
    rstd = _inverse_rms(tl.sum(x * x, axis=1, keep_dims=True), inside, eps, WIDTH)
    normalized = x * rstd
    dweight = dnormed * normalized
    if NEED_X:
        along = tl.sum(dweight * weight_channel, axis=1, keep_dims=True) / WIDTH
        dx = rstd * (dnormed * weight_channel - normalized * along)
        tl.store(dx_ptr + channel, downcast(dx, dx_ptr.dtype.element_ty), mask=mask)
    return dweight


@triton.jit
def backward_heads(
    dout_ptr,
    x_ptr,
    dx_ptr,
    weight,
    angles,
    batch,
    token,
    dout_strides,
    x_strides,
    dx_strides,
    heads,
    eps,
    NORM_LAST: tl.constexpr,
    KEEPS_DTYPE: tl.constexpr,
    NEED_X: tl.constexpr,
    HALF: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    UNIT: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Heads of one token; returns what each adds to the gradient of the weight's first and second half, or of all."""
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None].to(tl.int64)
    inside = head < heads
    # The token's address is a scalar; offsets in it are the same for all tokens, so they are computed once.
    dout_ptr += (batch * dout_strides[0] + token * dout_strides[1]) * UNIT
    dout_ptr += head * dout_strides[2] * UNIT
    x_ptr += (batch * x_strides[0] + token * x_strides[1]) * UNIT
    x_ptr += head * x_strides[2] * UNIT
    if NEED_X:
        dx_ptr += (batch * dx_strides[0] + token * dx_strides[1]) * UNIT
        dx_ptr += head * dx_strides[2] * UNIT
    if WIDTH == 2 * HALF:
        first, second = _backward_halves(
            dout_ptr,
            x_ptr,
            dx_ptr,
            weight,
            angles,
            inside,
            eps,
            NORM_LAST,
            KEEPS_DTYPE,
            NEED_X,
            HALF,
            TILE,
        )
    else:
        first = _backward_whole(
            dout_ptr,
            x_ptr,
            dx_ptr,
            weight,
            angles,
            inside,
            eps,
            NEED_X,
            HALF,
            WIDTH,
            TILE,
        )
        second = first
    return first, second


@triton.jit
def store_partial(partial_ptr, first, second, HALF: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """Write the sums over heads to a row of partial sums."""
    channel = tl.arange(0, TILE)
    if WIDTH == 2 * HALF:
        tl.store(partial_ptr + channel, tl.sum(first, axis=0), mask=channel < HALF)
        tl.store(partial_ptr + HALF + channel, tl.sum(second, axis=0), mask=channel < HALF)
    else:
        tl.store(partial_ptr + channel, tl.sum(first, axis=0), mask=channel < WIDTH)
