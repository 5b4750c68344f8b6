"""Rotary position embedding of heads whose halves are no power of two, as in vision towers (72 and 80 channels).

A tile that is a power of two wide would leave up to half of the lanes idle, and the halves of 72 channels begin at
odd places. Here a program turns whole heads laid end to end: channels are loaded and stored in order, 16 bytes a lane
where the width allows, and each one's partner is loaded once more, from the cache.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from opslot.ops._common.triton import Launcher, cdiv

_BLOCK = 1024
_WARPS = 4


@triton.jit
def _turn_heads(
    x_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    x_batch_stride,
    x_token_stride,
    x_head_stride,
    out_batch_stride,
    out_token_stride,
    out_head_stride,
    cos_batch_stride,
    cos_token_stride,
    sin_batch_stride,
    sin_token_stride,
    first_row,
    rows,
    tokens,
    INVERSE: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Turn ROWS heads from `first_row` on, of rows counted over batch, token and head, the head fastest."""
    element = tl.arange(0, BLOCK)
    channel = element % WIDTH
    row = first_row + element // WIDTH
    inside = (element < ROWS * WIDTH) & (row < rows)
    head = (row % HEADS).to(tl.int64)
    token = (row // HEADS % tokens).to(tl.int64)
    batch = (row // HEADS // tokens).to(tl.int64)
    second = channel >= WIDTH // 2
    partner = tl.where(second, channel - WIDTH // 2, channel + WIDTH // 2)
    source = x_ptr + (batch * x_batch_stride + token * x_token_stride + head * x_head_stride) * UNIT
    target = out_ptr + (batch * out_batch_stride + token * out_token_stride + head * out_head_stride) * UNIT
    cos_ptr += (batch * cos_batch_stride + token * cos_token_stride) * UNIT
    sin_ptr += (batch * sin_batch_stride + token * sin_token_stride) * UNIT
    cos = tl.load(cos_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(source + channel, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(source + partner, mask=inside, other=0.0).to(tl.float32)
    if INVERSE:
        sin = tl.load(sin_ptr + partner, mask=inside, other=0.0).to(tl.float32)
        turned = x * cos + tl.where(second, -other, other) * sin
    else:
        sin = tl.load(sin_ptr + channel, mask=inside, other=0.0).to(tl.float32)
        turned = x * cos + tl.where(second, other, -other) * sin
    tl.store(target + channel, turned.to(out_ptr.dtype.element_ty), mask=inside)


_STRIDES = [
    f"{tensor}_{axis}_stride"
    for tensor in ("q", "k", "q_out", "k_out", "cos", "sin")
    for axis in ("batch", "token", "head")
    if axis != "head" or tensor not in ("cos", "sin")
]


@triton.jit(do_not_specialize=[*_STRIDES, "tokens", "q_rows", "k_rows", "q_programs"])
def _flat_kernel(
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
    q_rows,
    k_rows,
    q_programs,
    INVERSE: tl.constexpr,
    WIDTH: tl.constexpr,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    if program < q_programs:
        _turn_heads(
            q_ptr,
            cos_ptr,
            sin_ptr,
            q_out_ptr,
            q_batch_stride,
            q_token_stride,
            q_head_stride,
            q_out_batch_stride,
            q_out_token_stride,
            q_out_head_stride,
            cos_batch_stride,
            cos_token_stride,
            sin_batch_stride,
            sin_token_stride,
            program * ROWS,
            q_rows,
            tokens,
            INVERSE,
            WIDTH,
            Q_HEADS,
            ROWS,
            UNIT,
            BLOCK,
        )
    elif K_HEADS > 0:
        _turn_heads(
            k_ptr,
            cos_ptr,
            sin_ptr,
            k_out_ptr,
            k_batch_stride,
            k_token_stride,
            k_head_stride,
            k_out_batch_stride,
            k_out_token_stride,
            k_out_head_stride,
            cos_batch_stride,
            cos_token_stride,
            sin_batch_stride,
            sin_token_stride,
            (program - q_programs) * ROWS,
            k_rows,
            tokens,
            INVERSE,
            WIDTH,
            K_HEADS,
            ROWS,
            UNIT,
            BLOCK,
        )


_launch = Launcher(_flat_kernel)


def suits_flat(width: int, rotary: int, interleaved: bool) -> bool:
    """Whether heads of `width` channels are turned here: all `rotary` channels turn, in halves of odd width."""
    half = rotary // 2
    return rotary == width and not interleaved and half & (half - 1) != 0 and width <= _BLOCK


@functools.lru_cache(maxsize=1024)
def _arguments(
    shape: tuple[int, ...],
    q_strides: tuple[tuple[int, ...], ...],
    k_heads: int,
    k_strides: tuple[tuple[int, ...], ...],
    cos_rows: int,
    cos_strides: tuple[int, ...],
    sin_strides: tuple[int, ...],
    inverse: bool,
) -> tuple[tuple[int, int, int], tuple[int, ...], tuple[Any, ...]]:
    """Grid, scalars and constants of a launch; `q_strides`, `k_strides` of the tensor read and of the one written."""
    batch, q_heads, tokens, width = shape
    strides = []
    for batch_stride, head_stride, token_stride, _ in (q_strides[0], k_strides[0], q_strides[1], k_strides[1]):
        strides += [batch_stride, token_stride, head_stride]
    for batch_stride, token_stride, _ in (cos_strides, sin_strides):
        strides += [batch_stride if cos_rows > 1 else 0, token_stride]
    unit = math.gcd(16, *strides)
    heads_a_program = _BLOCK // width
    q_rows, k_rows = batch * tokens * q_heads, batch * tokens * k_heads
    q_programs = cdiv(q_rows, heads_a_program)
    scalars = (*(stride // unit for stride in strides), tokens, q_rows, k_rows, q_programs)
    constants = (inverse, width, q_heads, k_heads, heads_a_program, unit, _BLOCK)
    return (q_programs + cdiv(k_rows, heads_a_program), 1, 1), scalars, constants


_NO_STRIDES: tuple[tuple[int, ...], ...] = ((0, 0, 0, 0), (0, 0, 0, 0))


def turn_flat(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, q_out: Tensor, k_out: Tensor | None, inverse: bool
) -> None:
    """Turn `q` and `k` [B, heads, S, D] into `q_out` and `k_out` by angles [B or 1, S, D]; channels are adjacent."""
    k_heads, k_strides = 0, _NO_STRIDES
    if k is not None and k_out is not None:
        k_heads, k_strides = k.shape[1], (k.stride(), k_out.stride())
    grid, scalars, constants = _arguments(
        q.shape,
        (q.stride(), q_out.stride()),
        k_heads,
        k_strides,
        cos.shape[0],
        cos.stride(),
        sin.stride(),
        inverse,
    )
    _launch(grid, (q, k, cos, sin, q_out, k_out), (), scalars, constants, _WARPS)
