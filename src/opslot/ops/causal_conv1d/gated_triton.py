"""Gated short convolution in Triton: both gates and the convolution in one pass forward and one backward.

A program processes tiles of a span of tokens for a block of channels. Each tap loads the tile again, shifted by its
lag, which caches serve. Backward recomputes the convolution from the inputs, which it loads anyway. The weight's
gradient is summed per span in registers, then over spans in a fixed order.

For packed documents, one integer per token, its position in the document, limits how far taps reach back.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from opslot._base.kernel_launch import KernelLauncher, cdiv
from opslot.ops._common.arguments import are_given, reject, require_floats, zero
from opslot.ops._common.custom_op import differentiable_op, empty_gradients
from opslot.ops._common.documents import check_cu_seqlens, one_row
from opslot.ops.causal_conv1d.triton import dense, document_positions, write_filter_gradients

_LABEL = "causal_conv1d_implementation='triton'"
_TAPS = 8
_TOKENS, _COLUMNS, _SPAN, _WARPS = 16, 128, 64, 4


@triton.jit
def _tap(weight_ptr, column, lag, WIDTH: tl.constexpr, CHANNELS: tl.constexpr):
    """The filter's factors for the inputs `lag` tokens back."""
    return tl.load(weight_ptr + column * WIDTH + (WIDTH - 1 - lag), mask=column < CHANNELS, other=0.0).to(tl.float32)


@triton.jit
def _part(ptr, token, column, stride, mask, PART: tl.constexpr, CHANNELS: tl.constexpr):
    """A tile of the first (0), second (1) or third (2) part of the projection."""
    at = token.to(tl.int64)[:, None] * stride + (column + PART * CHANNELS)[None, :]
    return tl.load(ptr + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["length"])
def _forward_kernel(
    projected_ptr,
    weight_ptr,
    bias_ptr,
    position_ptr,
    out_ptr,
    projected_batch,
    projected_stride,
    length,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PACKED: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    row = tl.program_id(2).to(tl.int64)
    projected_ptr += row * projected_batch
    inside = (column < CHANNELS)[None, :]
    position = token
    if PACKED:
        position = tl.load(position_ptr + token, mask=token < length, other=0)
    convolved = tl.zeros((TOKENS, COLUMNS), dtype=tl.float32)
    if HAS_BIAS:
        convolved += tl.load(bias_ptr + column, mask=column < CHANNELS, other=0.0).to(tl.float32)[None, :]
    for lag in tl.static_range(WIDTH):
        mask = ((position >= lag) & (token < length))[:, None] & inside
        before = _part(projected_ptr, token - lag, column, projected_stride, mask, 0, CHANNELS)
        x = _part(projected_ptr, token - lag, column, projected_stride, mask, 2, CHANNELS)
        convolved += _tap(weight_ptr, column, lag, WIDTH, CHANNELS)[None, :] * (before * x)
    mask = (token < length)[:, None] & inside
    after = _part(projected_ptr, token, column, projected_stride, mask, 1, CHANNELS)
    target = out_ptr + (row * length + token)[:, None] * CHANNELS + column[None, :]
    tl.store(target, (after * convolved).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["length"])
def _backward_kernel(
    dout_ptr,
    projected_ptr,
    weight_ptr,
    bias_ptr,
    position_ptr,
    dprojected_ptr,
    partial_ptr,
    dout_batch,
    dout_stride,
    projected_batch,
    projected_stride,
    length,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PACKED: tl.constexpr,
    NEED_FILTER: tl.constexpr,
    SUMS: tl.constexpr,
    SPAN: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.program_id(1) * SPAN
    row = tl.program_id(2).to(tl.int64)
    dout_ptr += row * dout_batch
    projected_ptr += row * projected_batch
    dprojected_ptr += row * length * 3 * CHANNELS
    inside = (column < CHANNELS)[None, :]
    # One row per lag, then that of the bias.
    sums = tl.zeros((SUMS, COLUMNS), dtype=tl.float32)
    sum_row = tl.arange(0, SUMS)[:, None]
    for step in range(0, SPAN, TOKENS):
        token = first + step + tl.arange(0, TOKENS)
        mask = (token < length)[:, None] & inside
        position = token
        if PACKED:
            position = tl.load(position_ptr + token, mask=token < length, other=0)
        dout = _part(dout_ptr, token, column, dout_stride, mask, 0, CHANNELS)
        after = _part(projected_ptr, token, column, projected_stride, mask, 1, CHANNELS)
        dconvolved = dout * after
        convolved = tl.zeros((TOKENS, COLUMNS), dtype=tl.float32)
        dproduct = tl.zeros((TOKENS, COLUMNS), dtype=tl.float32)
        if HAS_BIAS:
            convolved += tl.load(bias_ptr + column, mask=column < CHANNELS, other=0.0).to(tl.float32)[None, :]
        for lag in tl.static_range(WIDTH):
            tap = _tap(weight_ptr, column, lag, WIDTH, CHANNELS)[None, :]
            reached = ((position >= lag) & (token < length))[:, None] & inside
            before = _part(projected_ptr, token - lag, column, projected_stride, reached, 0, CHANNELS)
            x = _part(projected_ptr, token - lag, column, projected_stride, reached, 2, CHANNELS)
            product = before * x
            convolved += tap * product
            if NEED_FILTER:
                sums += tl.where(sum_row == lag, tl.sum(dconvolved * product, axis=0)[None, :], 0.0)
            # The later token whose tap of this lag reaches this one.
            later = token + lag
            reaches = later < length
            if PACKED:
                reaches &= tl.load(position_ptr + later, mask=reaches, other=0) >= lag
            reaching = reaches[:, None] & inside
            later_dout = _part(dout_ptr, later, column, dout_stride, reaching, 0, CHANNELS)
            later_after = _part(projected_ptr, later, column, projected_stride, reaching, 1, CHANNELS)
            dproduct += tap * (later_dout * later_after)
        if NEED_FILTER:
            sums += tl.where(sum_row == WIDTH, tl.sum(dconvolved, axis=0)[None, :], 0.0)
        before = _part(projected_ptr, token, column, projected_stride, mask, 0, CHANNELS)
        x = _part(projected_ptr, token, column, projected_stride, mask, 2, CHANNELS)
        target = dprojected_ptr + token.to(tl.int64)[:, None] * (3 * CHANNELS) + column[None, :]
        dtype = dprojected_ptr.dtype.element_ty
        tl.store(target, (dproduct * x).to(dtype), mask=mask)
        tl.store(target + CHANNELS, (dout * convolved).to(dtype), mask=mask)
        tl.store(target + 2 * CHANNELS, (dproduct * before).to(dtype), mask=mask)
    if NEED_FILTER:
        span = row * tl.num_programs(1) + tl.program_id(1)
        partial = partial_ptr + (span * SUMS + sum_row) * CHANNELS + column[None, :]
        tl.store(partial, sums, mask=inside)


_launch_forward = KernelLauncher(_forward_kernel)
_launch_backward = KernelLauncher(_backward_kernel)


@functools.cache
def _columns(channels: int) -> int:
    return min(_COLUMNS, triton.next_power_of_2(channels))


def _rows(x: Tensor) -> Tensor:
    """[B, S, channels] with adjacent channels: what a projection returns, else a copy."""
    return x if x.stride(2) == 1 or x.shape[2] == 1 else x.contiguous()


def _forward(out: Tensor, projected: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor | None) -> None:
    if out.numel() == 0:
        return
    batch, length, channels = out.shape
    projected, columns = _rows(projected), _columns(channels)
    _launch_forward(
        (cdiv(channels, columns), cdiv(length, _TOKENS), batch),
        (
            projected,
            weight.contiguous(),
            dense(bias),
            document_positions(cu_seqlens, length),
            out,
        ),
        (projected.stride(0), projected.stride(1)),
        (length,),
        (channels, weight.shape[1], *are_given(bias, cu_seqlens), _TOKENS, columns),
        _WARPS,
    )


def _allocate_gradients(
    dout: Tensor, projected: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any
) -> tuple[Tensor | None, ...]:
    """The gradient of `projected` is always computed."""
    need_filter = rest[-2] or rest[-1]
    return empty_gradients((projected, weight, bias), (True, need_filter, need_filter))


def _backward(
    gradients: tuple[Tensor, Tensor | None, Tensor | None],
    dout: Tensor,
    projected: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor | None,
    *needs: bool,
) -> None:
    dprojected, dweight, dbias = gradients
    if dout.numel() == 0:
        zero(dweight, dbias)
        return
    batch, length, channels = dout.shape
    width = weight.shape[1]
    projected, dout, columns = _rows(projected), _rows(dout), _columns(channels)
    spans, sums = cdiv(length, _SPAN), triton.next_power_of_2(width + 1)
    partial = None if dweight is None else dout.new_empty((batch * spans, sums, channels), dtype=torch.float32)
    _launch_backward(
        (cdiv(channels, columns), spans, batch),
        (
            dout,
            projected,
            weight.contiguous(),
            dense(bias),
            document_positions(cu_seqlens, length),
            dprojected,
            partial,
        ),
        (dout.stride(0), dout.stride(1), projected.stride(0), projected.stride(1)),
        (length,),
        (channels, width, *are_given(bias, cu_seqlens, dweight), sums, _SPAN, _TOKENS, columns),
        _WARPS,
    )
    if partial is not None and dweight is not None:
        write_filter_gradients(partial.sum(0), dweight, dbias, width)


_gated_causal_conv1d = differentiable_op(
    "gated_causal_conv1d(Tensor projected, Tensor weight, Tensor? bias, Tensor? cu_seqlens) -> Tensor",
    allocate=lambda projected, weight, *_: projected.new_empty(*projected.shape[:2], weight.shape[0]),
    launch=_forward,
    allocate_gradients=_allocate_gradients,
    launch_backward=_backward,
    differentiable=3,
)


def gated(projected: Tensor, weight: Tensor, bias: Tensor | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
    """`op.gated` for float32, bfloat16 and float16, also mixed, and filters of up to eight taps."""
    require_floats(_LABEL, projected=projected, weight=weight, bias=bias)
    if weight.dim() != 2 or not 1 <= weight.shape[1] <= _TAPS:
        reject(
            _LABEL, "weight", f"its shape is {tuple(weight.shape)}, not [D, 1 to {_TAPS}]", "use torch_packed or eager"
        )
    channels = weight.shape[0]
    if projected.dim() != 3 or projected.shape[2] != 3 * channels:
        reject(_LABEL, "projected", f"its shape is {tuple(projected.shape)}, not [B, S, {3 * channels}]", "use eager")
    if bias is not None and bias.shape != (channels,):
        reject(_LABEL, "bias", f"its shape is {tuple(bias.shape)}, not ({channels},)", "use eager")
    if cu_seqlens is None:
        return _gated_causal_conv1d(projected, weight, bias, None)
    rows, length = projected.shape[:2]
    check_cu_seqlens(_LABEL, "cu_seqlens", cu_seqlens, rows, length)
    return _gated_causal_conv1d(one_row(projected), weight, bias, cu_seqlens).view(rows, length, channels)
