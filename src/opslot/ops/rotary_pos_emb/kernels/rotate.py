"""The rotation of the heads of queries and keys, in Triton.

A program rotates all heads of one token, so cos and sin are loaded once. Tensors may have any strides, so transposed
views are not copied. Backward is the same kernel with the inverse rotation.

Strides are passed in units of UNIT elements, a constexpr that divides all of them. Otherwise strides that are not
multiples of 16, as with heads of 72 channels, would cause 2-byte instead of 16-byte loads.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from opslot._base.kernel_launch import KernelLauncher, cdiv
from opslot.ops._common.arguments import adjacent

# Maximum elements of a tile of one half of the heads; more heads need several programs per token.
_TILE = 4096


@triton.jit
def load_halves(row_ptr, inside, HALF: tl.constexpr, HALF_TILE: tl.constexpr):
    """First and second half of the channels of the rows at `row_ptr` [rows, 1], in fp32: [rows, HALF_TILE] each."""
    channel = tl.arange(0, HALF_TILE)[None, :]
    mask = inside & (channel < HALF)
    first = tl.load(row_ptr + channel, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(row_ptr + HALF + channel, mask=mask, other=0.0).to(tl.float32)
    return first, second


@triton.jit
def rotate_pairs(first, second, angles, INVERSE: tl.constexpr):
    """`angles` are cos of the first and second channels of each pair, and sin of both."""
    cos_first, cos_second, sin_first, sin_second = angles
    if INVERSE:
        rotated_first = first * cos_first + second * sin_second
        rotated_second = second * cos_second - first * sin_first
    else:
        rotated_first = first * cos_first - second * sin_first
        rotated_second = second * cos_second + first * sin_second
    return rotated_first, rotated_second


@triton.jit
def _load_pairs(
    row_ptr, inside, INTERLEAVED: tl.constexpr, HALF: tl.constexpr, HALF_TILE: tl.constexpr, HEADS: tl.constexpr
):
    """First and second channels of each pair, [HEADS, HALF_TILE], of the heads at `row_ptr` [HEADS, 1], in fp32."""
    if INTERLEAVED:
        channel = tl.arange(0, 2 * HALF_TILE)[None, :]
        both = tl.load(row_ptr + channel, mask=inside & (channel < 2 * HALF), other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(both, (HEADS, HALF_TILE, 2)))
    else:
        first, second = load_halves(row_ptr, inside, HALF, HALF_TILE)
    return first, second


@triton.jit
def _store_pairs(
    row_ptr,
    first,
    second,
    inside,
    INTERLEAVED: tl.constexpr,
    HALF: tl.constexpr,
    HALF_TILE: tl.constexpr,
    HEADS: tl.constexpr,
):
    dtype: tl.constexpr = row_ptr.dtype.element_ty
    if INTERLEAVED:
        channel = tl.arange(0, 2 * HALF_TILE)[None, :]
        both = tl.reshape(tl.join(first, second), (HEADS, 2 * HALF_TILE))
        tl.store(row_ptr + channel, both.to(dtype), mask=inside & (channel < 2 * HALF))
    else:
        channel = tl.arange(0, HALF_TILE)[None, :]
        mask = inside & (channel < HALF)
        tl.store(row_ptr + channel, first.to(dtype), mask=mask)
        tl.store(row_ptr + HALF + channel, second.to(dtype), mask=mask)


@triton.jit
def _rotate_heads(
    x_ptr,
    out_ptr,
    x_head_stride,
    out_head_stride,
    first_head,
    heads,
    angles,
    INVERSE: tl.constexpr,
    INTERLEAVED_IN: tl.constexpr,
    INTERLEAVED_OUT: tl.constexpr,
    HALF: tl.constexpr,
    HALF_TILE: tl.constexpr,
    PASS: tl.constexpr,
    PASS_TILE: tl.constexpr,
    PASS_FIRST: tl.constexpr,
    UNIT: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Rotate heads [first_head, first_head + HEADS) of one token; PASS channels before or behind those are copied."""
    head = first_head + tl.arange(0, HEADS)[:, None].to(tl.int64)
    inside = head < heads
    source = x_ptr + head * x_head_stride * UNIT
    target = out_ptr + head * out_head_stride * UNIT
    ROTATED: tl.constexpr = PASS if PASS_FIRST else 0
    first, second = _load_pairs(source + ROTATED, inside, INTERLEAVED_IN, HALF, HALF_TILE, HEADS)
    first, second = rotate_pairs(first, second, angles, INVERSE)
    _store_pairs(target + ROTATED, first, second, inside, INTERLEAVED_OUT, HALF, HALF_TILE, HEADS)
    if PASS > 0:
        COPIED: tl.constexpr = 0 if PASS_FIRST else 2 * HALF
        channel = COPIED + tl.arange(0, PASS_TILE)[None, :]
        mask = inside & (channel < COPIED + PASS)
        passed = tl.load(source + channel, mask=mask, other=0.0)
        tl.store(target + channel, passed.to(out_ptr.dtype.element_ty), mask=mask)


def stride_names(*tensors: str) -> list[str]:
    """Of the kernels' parameters for `strides_in_units`."""
    of_heads = [f"{tensor}_{axis}_stride" for tensor in tensors for axis in ("batch", "token", "head")]
    return [*of_heads, *(f"{tensor}_{axis}_stride" for tensor in ("cos", "sin") for axis in ("batch", "token"))]


@triton.jit(do_not_specialize=[*stride_names("q", "k", "q_out", "k_out"), "tokens", "q_heads", "k_heads"])
def _rotary_kernel(
    q_ptr,
    k_ptr,
    cos_ptr,
    sin_ptr,
    q_out_ptr,
    k_out_ptr,
    q_batch_stride,
    q_token_stride,
    q_head_stride,
    k_batch_stride,
    k_token_stride,
    k_head_stride,
    q_out_batch_stride,
    q_out_token_stride,
    q_out_head_stride,
    k_out_batch_stride,
    k_out_token_stride,
    k_out_head_stride,
    cos_batch_stride,
    cos_token_stride,
    sin_batch_stride,
    sin_token_stride,
    tokens,
    q_heads,
    k_heads,
    INVERSE: tl.constexpr,
    INTERLEAVED_IN: tl.constexpr,
    INTERLEAVED_OUT: tl.constexpr,
    SHARED_COS: tl.constexpr,
    COS_STRIDE: tl.constexpr,
    HALF: tl.constexpr,
    HALF_TILE: tl.constexpr,
    Q_PASS: tl.constexpr,
    Q_PASS_TILE: tl.constexpr,
    K_PASS: tl.constexpr,
    K_PASS_TILE: tl.constexpr,
    PASS_FIRST: tl.constexpr,
    UNIT: tl.constexpr,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
):
    batch = (tl.program_id(0) // tokens).to(tl.int64)
    token = (tl.program_id(0) % tokens).to(tl.int64)
    group = tl.program_id(1)
    pair = tl.arange(0, HALF_TILE)[None, :]
    inside = pair < HALF
    cos_ptr += (batch * cos_batch_stride + token * cos_token_stride) * UNIT
    sin_ptr += (batch * sin_batch_stride + token * sin_token_stride) * UNIT
    cos_first = tl.load(cos_ptr + pair * COS_STRIDE, mask=inside, other=0.0).to(tl.float32)
    sin_first = tl.load(sin_ptr + pair * COS_STRIDE, mask=inside, other=0.0).to(tl.float32)
    if SHARED_COS:
        cos_second, sin_second = cos_first, sin_first
    else:
        cos_second = tl.load(cos_ptr + (HALF + pair) * COS_STRIDE, mask=inside, other=0.0).to(tl.float32)
        sin_second = tl.load(sin_ptr + (HALF + pair) * COS_STRIDE, mask=inside, other=0.0).to(tl.float32)
    for i in tl.static_range(2):
        # A constant, which is 0 without k.
        if (Q_HEADS, K_HEADS)[i] > 0:
            batch_stride, token_stride = (q_batch_stride, k_batch_stride)[i], (q_token_stride, k_token_stride)[i]
            out_batch_stride = (q_out_batch_stride, k_out_batch_stride)[i]
            out_token_stride = (q_out_token_stride, k_out_token_stride)[i]
            _rotate_heads(
                (q_ptr, k_ptr)[i] + (batch * batch_stride + token * token_stride) * UNIT,
                (q_out_ptr, k_out_ptr)[i] + (batch * out_batch_stride + token * out_token_stride) * UNIT,
                (q_head_stride, k_head_stride)[i],
                (q_out_head_stride, k_out_head_stride)[i],
                group * (Q_HEADS, K_HEADS)[i],
                (q_heads, k_heads)[i],
                (cos_first, cos_second, sin_first, sin_second),
                INVERSE,
                INTERLEAVED_IN,
                INTERLEAVED_OUT,
                HALF,
                HALF_TILE,
                (Q_PASS, K_PASS)[i],
                (Q_PASS_TILE, K_PASS_TILE)[i],
                PASS_FIRST,
                UNIT,
                (Q_HEADS, K_HEADS)[i],
            )


_launch = KernelLauncher(_rotary_kernel)


@dataclass(frozen=True)
class RotationTiling:
    """Programs per token, tile sizes and warps."""

    groups: int
    q_tile: int
    k_tile: int
    half: int
    half_tile: int
    warps: int


@functools.cache
def _plan(q_heads: int, k_heads: int, rotary: int, pass_first: int) -> RotationTiling:
    """`pass_first`: channels of queries that are copied before the others, 0 for copies behind them."""
    half = rotary // 2
    half_tile = triton.next_power_of_2(half)
    # Half of the channels of a head, as far as they are in one tile.
    groups = cdiv(max(q_heads, k_heads), max(1, _TILE // max(half_tile, triton.next_power_of_2(pass_first) // 2)))
    q_tile = triton.next_power_of_2(cdiv(q_heads, groups))
    k_tile = triton.next_power_of_2(cdiv(k_heads, groups)) if k_heads else 0
    lanes = q_tile * half_tile
    # Idle lanes reduce the bytes in flight: 16384 patches with 16 heads of 72 take 0.098 ms on an H200 with one warp,
    # 0.090 ms with two; 32 heads of 80 take 3% longer with two than with one, and 20% longer with four.
    warps = min(8, max(1, lanes // 1024)) if half == half_tile else min(2, max(1, lanes // 512))
    if pass_first:
        # The copy moves more bytes than the rotation.
        warps = min(8, max(1, q_tile * triton.next_power_of_2(pass_first) // 1024))
    return RotationTiling(groups, q_tile, k_tile, half, half_tile, warps)


def strides_in_units(
    of_heads: Iterable[Sequence[int]], of_cos_sin: Iterable[Sequence[int]], rows: int
) -> tuple[int, list[int]]:
    """UNIT, and the strides in this unit of tensors [B, heads, S, D], by batch, token and head, and of cos and sin
    [rows, S, R], by batch and token.
    """
    strides = []
    for batch_stride, head_stride, token_stride, _ in of_heads:
        strides += [batch_stride, token_stride, head_stride]
    for batch_stride, token_stride, _ in of_cos_sin:
        strides += [batch_stride if rows > 1 else 0, token_stride]
    unit = math.gcd(16, *strides)
    return unit, [stride // unit for stride in strides]


def with_equal_strides(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Copies unless both have one stride of channels, 1 or 2, which the kernels take."""
    if cos.stride(-1) == sin.stride(-1) in (1, 2):
        return cos, sin
    return cos.contiguous(), sin.contiguous()


@functools.lru_cache(maxsize=1024)
def _arguments(
    shape: tuple[int, ...],
    q_strides: tuple[tuple[int, ...], ...],
    k_heads: int,
    k_width: int,
    k_strides: tuple[tuple[int, ...], ...],
    cos_shape: tuple[int, ...],
    cos_strides: tuple[int, ...],
    sin_strides: tuple[int, ...],
    rotary: int,
    interleaved: tuple[bool, bool],
    last: bool,
    inverse: bool,
) -> tuple[tuple[int, int, int], tuple[int, ...], tuple[Any, ...], int]:
    """Grid, scalars, constants and warps of a launch.

    Args:
        shape: of q, [B, heads, S, D].
        rotary: channels of a head that are rotated.
        interleaved: whether input and output have GPT-J layout; else NeoX.
        last: the last channels are rotated, not the first.
        q_strides, k_strides: of input and output; `k_heads` is 0 without k.
    """
    batch, q_heads, tokens, width = shape
    plan = _plan(q_heads, k_heads, rotary, width - rotary if last else 0)
    unit, strides = strides_in_units(
        (q_strides[0], k_strides[0], q_strides[1], k_strides[1]), (cos_strides, sin_strides), cos_shape[0]
    )
    copied = [tile for x in (width, k_width) for tile in (x - rotary, triton.next_power_of_2(max(x - rotary, 1)))]
    constants = (
        inverse,
        *interleaved,
        any(interleaved) or cos_shape[-1] != rotary,
        cos_strides[-1],
        plan.half,
        plan.half_tile,
        *copied,
        last,
        unit,
        plan.q_tile,
        plan.k_tile,
    )
    return (batch * tokens, plan.groups, 1), (*strides, tokens, q_heads, k_heads), constants, plan.warps


_NO_STRIDES: tuple[tuple[int, ...], ...] = ((0, 0, 0, 0), (0, 0, 0, 0))


def launch_rotation(
    outputs: tuple[Tensor, Tensor | None],
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    dtype: torch.dtype,
    rotary: int,
    interleaved_in: bool,
    interleaved_out: bool,
    last: bool,
    inverse: bool,
) -> None:
    """Rotate the first or last `rotary` channels of one or two tensors [B, heads, S, D]; results in `dtype`.

    `cos` and `sin` are [B or 1, S, rotary], or [B or 1, S, rotary / 2] with one element per pair.
    """
    q_out, k_out = outputs
    if q.numel() == 0:
        return
    q, k = adjacent(q), None if k is None else adjacent(k)
    interleaved = (interleaved_out, interleaved_in) if inverse else (interleaved_in, interleaved_out)
    cos, sin = with_equal_strides(cos, sin)
    k_heads, k_width, k_strides = 0, rotary, _NO_STRIDES
    if k is not None and k_out is not None:
        k_heads, k_width, k_strides = k.shape[1], k.shape[3], (k.stride(), k_out.stride())
    grid, scalars, constants, warps = _arguments(
        q.shape,
        (q.stride(), q_out.stride()),
        k_heads,
        k_width,
        k_strides,
        cos.shape,
        cos.stride(),
        sin.stride(),
        rotary,
        interleaved,
        last,
        inverse,
    )
    _launch(grid, (q, k, cos, sin, q_out, k_out), (), scalars, constants, warps)
