"""Depthwise causal convolution in Triton, up to four taps: one pass forward, one pass backward, deterministic.

A program processes a span of tokens for a block of channels. The last three inputs stay in registers, so every element
is loaded once. Backward recomputes the convolution from the inputs, which it loads anyway, and carries the input
gradients to which later tokens still add. Spans overlap by three tokens. The weight's gradient is
summed per span in registers, then over spans in a fixed order.

For packed documents, one integer per token, its position in the document, limits how far taps reach back.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from opslot._base.kernel_launch import KernelLauncher, cdiv
from opslot.ops._common.arguments import are_given, reject, require_floats, zero
from opslot.ops._common.custom_op import differentiable_op
from opslot.ops.causal_conv1d.op import kernel_of

_LABEL = "causal_conv1d_implementation='triton'"
_TAPS = 4


@triton.jit(do_not_specialize=["documents", "length", "steps"])
def _positions_kernel(cu_seqlens_ptr, position_ptr, documents, length, steps, BLOCK: tl.constexpr):
    """Position of each token in its document, by bisection of cu_seqlens."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    low = tl.zeros((BLOCK,), dtype=tl.int32)
    high = low + documents
    for _ in range(steps):
        middle = (low + high) // 2
        started = tl.load(cu_seqlens_ptr + middle).to(tl.int32) <= token
        low = tl.where(started, middle, low)
        high = tl.where(started, high, middle)
    start = tl.load(cu_seqlens_ptr + low).to(tl.int32)
    tl.store(position_ptr + token, token - start, mask=token < length)


@triton.jit
def _row(ptr, token, stride, column, low, high, CHANNELS: tl.constexpr):
    """Channels of one token; zeros outside low <= token < high."""
    limit = tl.where((token >= low) & (token < high), CHANNELS, 0)
    return tl.load(ptr + token.to(tl.int64) * stride + column, mask=column < limit, other=0.0)


@triton.jit
def _store_row(ptr, token, column, value, low, high, CHANNELS: tl.constexpr):
    """Channels of one token, if low <= token < high."""
    limit = tl.where((token >= low) & (token < high), CHANNELS, 0)
    target = ptr + token.to(tl.int64) * CHANNELS + column
    tl.store(target, value.to(ptr.dtype.element_ty), mask=column < limit)


@triton.jit
def _tap(weight_ptr, column, LAG: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr):
    """The filter's factor for the input `LAG` tokens back; zero for a filter that does not reach there."""
    if LAG < WIDTH:
        tap = tl.load(weight_ptr + column * WIDTH + (WIDTH - 1 - LAG), mask=column < CHANNELS, other=0.0).to(tl.float32)
    else:
        tap = tl.zeros(column.shape, dtype=tl.float32)
    return tap


@triton.jit(do_not_specialize=["length"])
@no_type_check  # Tuples grow in its unrolled loops.
def _forward_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    position_ptr,
    out_ptr,
    x_batch,
    x_stride,
    length,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    SILU: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PACKED: tl.constexpr,
    SPAN: tl.constexpr,
    AHEAD: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < CHANNELS
    first = tl.program_id(1) * SPAN
    row = tl.program_id(2).to(tl.int64)
    x_ptr += row * x_batch
    out_ptr += row * length * CHANNELS
    w0 = _tap(weight_ptr, column, 0, WIDTH, CHANNELS)
    w1 = _tap(weight_ptr, column, 1, WIDTH, CHANNELS)
    w2 = _tap(weight_ptr, column, 2, WIDTH, CHANNELS)
    w3 = _tap(weight_ptr, column, 3, WIDTH, CHANNELS)
    bias = tl.zeros((COLUMNS,), dtype=tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    x1 = _row(x_ptr, first - 1, x_stride, column, 0, length, CHANNELS).to(tl.float32)
    x2 = _row(x_ptr, first - 2, x_stride, column, 0, length, CHANNELS).to(tl.float32)
    x3 = _row(x_ptr, first - 3, x_stride, column, 0, length, CHANNELS).to(tl.float32)
    for step in range(0, SPAN, AHEAD):
        # Triton does not support unpacking (RUF005).
        loaded = ()
        for i in tl.static_range(AHEAD):
            token = first + step + i
            loaded = loaded + (_row(x_ptr, token, x_stride, column, 0, length, CHANNELS),)  # noqa: RUF005
        for i in tl.static_range(AHEAD):
            token = first + step + i
            x0 = loaded[i].to(tl.float32)
            if PACKED:
                position = tl.load(position_ptr + token, mask=token < length, other=0)
                x1 = tl.where(position >= 1, x1, 0.0)
                x2 = tl.where(position >= 2, x2, 0.0)
                x3 = tl.where(position >= 3, x3, 0.0)
            out = w0 * x0 + w1 * x1 + w2 * x2 + w3 * x3 + bias
            if SILU:
                out = out / (1.0 + tl.exp(-out))
            _store_row(out_ptr, token, column, out, 0, length, CHANNELS)
            x3 = x2
            x2 = x1
            x1 = x0


@triton.jit(do_not_specialize=["length"])
@no_type_check  # Tuples grow in its unrolled loops.
def _backward_kernel(
    dout_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    position_ptr,
    dx_ptr,
    partial_ptr,
    dout_batch,
    dout_stride,
    x_batch,
    x_stride,
    length,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    SILU: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PACKED: tl.constexpr,
    NEED_FILTER: tl.constexpr,
    SPAN: tl.constexpr,
    AHEAD: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < CHANNELS
    first = tl.program_id(1) * SPAN
    last = tl.minimum(first + SPAN, length)
    # Tokens up to three past the span still add to the span's input gradients.
    end = tl.minimum(last + 3, length)
    row = tl.program_id(2).to(tl.int64)
    dout_ptr += row * dout_batch
    x_ptr += row * x_batch
    dx_ptr += row * length * CHANNELS
    w0 = _tap(weight_ptr, column, 0, WIDTH, CHANNELS)
    w1 = _tap(weight_ptr, column, 1, WIDTH, CHANNELS)
    w2 = _tap(weight_ptr, column, 2, WIDTH, CHANNELS)
    w3 = _tap(weight_ptr, column, 3, WIDTH, CHANNELS)
    bias = tl.zeros((COLUMNS,), dtype=tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    x1 = _row(x_ptr, first - 1, x_stride, column, 0, length, CHANNELS).to(tl.float32)
    x2 = _row(x_ptr, first - 2, x_stride, column, 0, length, CHANNELS).to(tl.float32)
    x3 = _row(x_ptr, first - 3, x_stride, column, 0, length, CHANNELS).to(tl.float32)
    dx1 = tl.zeros((COLUMNS,), dtype=tl.float32)
    dx2 = tl.zeros((COLUMNS,), dtype=tl.float32)
    dx3 = tl.zeros((COLUMNS,), dtype=tl.float32)
    dw0 = tl.zeros((COLUMNS,), dtype=tl.float32)
    dw1 = tl.zeros((COLUMNS,), dtype=tl.float32)
    dw2 = tl.zeros((COLUMNS,), dtype=tl.float32)
    dw3 = tl.zeros((COLUMNS,), dtype=tl.float32)
    dbias = tl.zeros((COLUMNS,), dtype=tl.float32)
    for step in range(0, SPAN + 3, AHEAD):
        loaded = ()
        arriving = ()
        for i in tl.static_range(AHEAD):
            token = first + step + i
            loaded = loaded + (_row(x_ptr, token, x_stride, column, 0, end, CHANNELS),)  # noqa: RUF005
            arriving = arriving + (_row(dout_ptr, token, dout_stride, column, 0, end, CHANNELS),)  # noqa: RUF005
        for i in tl.static_range(AHEAD):
            token = first + step + i
            x0 = loaded[i].to(tl.float32)
            dout = arriving[i].to(tl.float32)
            if PACKED:
                position = tl.load(position_ptr + token, mask=token < end, other=0)
                x1 = tl.where(position >= 1, x1, 0.0)
                x2 = tl.where(position >= 2, x2, 0.0)
                x3 = tl.where(position >= 3, x3, 0.0)
                v1 = tl.where(position >= 1, w1, 0.0)
                v2 = tl.where(position >= 2, w2, 0.0)
                v3 = tl.where(position >= 3, w3, 0.0)
            else:
                v1 = w1
                v2 = w2
                v3 = w3
            if SILU:
                z = w0 * x0 + w1 * x1 + w2 * x2 + w3 * x3 + bias
                sigmoid = 1.0 / (1.0 + tl.exp(-z))
                dout *= sigmoid * (1.0 + z * (1.0 - sigmoid))
            if NEED_FILTER:
                own = tl.where(token < last, dout, 0.0)
                dw0 += own * x0
                dw1 += own * x1
                dw2 += own * x2
                dw3 += own * x3
                dbias += own
            # Add the last term of the oldest carried gradient.
            done = dx3 + v3 * dout
            _store_row(dx_ptr, token - 3, column, done, first, last, CHANNELS)
            dx3 = dx2 + v2 * dout
            dx2 = dx1 + v1 * dout
            dx1 = w0 * dout
            x3 = x2
            x2 = x1
            x1 = x0
    if NEED_FILTER:
        span = row * tl.num_programs(1) + tl.program_id(1)
        partial_ptr += span * 5 * CHANNELS + column
        tl.store(partial_ptr, dw0, mask=inside)
        tl.store(partial_ptr + CHANNELS, dw1, mask=inside)
        tl.store(partial_ptr + 2 * CHANNELS, dw2, mask=inside)
        tl.store(partial_ptr + 3 * CHANNELS, dw3, mask=inside)
        tl.store(partial_ptr + 4 * CHANNELS, dbias, mask=inside)


_launch_positions = KernelLauncher(_positions_kernel)
_launch_forward = KernelLauncher(_forward_kernel)
_launch_backward = KernelLauncher(_backward_kernel)


@dataclass(frozen=True)
class ConvTiling:
    """Tokens and channels of one program, rows that it loads ahead, and its warps."""

    span: int
    columns: int
    ahead: int
    warps: int

    @property
    def tile(self) -> tuple[int, int, int]:
        return self.span, self.ahead, self.columns


@functools.cache
def forward_plan(length: int, channels: int) -> ConvTiling:
    """Forward: four channels a thread, eight rows in flight."""
    columns = min(512, triton.next_power_of_2(channels))
    return ConvTiling(_span(length, 64), columns, ahead=8, warps=max(1, columns // 128))


@functools.cache
def backward_plan(length: int, channels: int) -> ConvTiling:
    """Backward: four channels a thread, four rows of each input in flight."""
    columns = min(1024, triton.next_power_of_2(channels))
    return ConvTiling(_span(length, 128), columns, ahead=4, warps=max(1, columns // 128))


def _span(length: int, most: int) -> int:
    return min(most, max(8, triton.next_power_of_2(length)))


def _rows(x: Tensor) -> Tensor:
    """[B, S, D] with adjacent channels: a view of a projection's output, else a copy."""
    rows = x.transpose(1, 2)
    return rows if rows.stride(2) == 1 or rows.shape[2] == 1 else rows.contiguous()


def dense(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.contiguous()


def write_filter_gradients(sums: Tensor, dweight: Tensor, dbias: Tensor | None, bias_row: int) -> None:
    """From sums over tokens [rows, D] with a row for each lag, and one for the bias."""
    # By lag in memory, by tap in the filter.
    dweight.copy_(sums[: dweight.shape[1]].flip(0).T)
    if dbias is not None:
        dbias.copy_(sums[bias_row])


def document_positions(cu_seqlens: Tensor | None, length: int) -> Tensor | None:
    if cu_seqlens is None:
        return None
    documents = cu_seqlens.numel()
    position = torch.empty(length, dtype=torch.int32, device=cu_seqlens.device)
    steps = max(documents - 1, 0).bit_length()
    grid = (cdiv(length, 256), 1, 1)
    _launch_positions(grid, (cu_seqlens.contiguous(), position), (), (documents, length, steps), (256,), 4)
    return position


def _allocate(x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor | None, silu: bool) -> Tensor:
    _, channels, length = x.shape
    # Not a transposed view of [B, S, D]: autograd forbids in-place writes to a view that a function returns.
    return x.new_empty_strided(x.shape, (length * channels, 1, channels))


def _forward(
    out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor | None, silu: bool
) -> None:
    if x.numel() == 0:
        return
    batch, channels, length = x.shape
    x = _rows(x)
    plan = forward_plan(length, channels)
    _launch_forward(
        (cdiv(channels, plan.columns), cdiv(length, plan.span), batch),
        (x, weight.contiguous(), dense(bias), document_positions(cu_seqlens, length), out),
        (x.stride(0), x.stride(1)),
        (length,),
        (channels, weight.shape[1], silu, *are_given(bias, cu_seqlens), *plan.tile),
        plan.warps,
    )


def _allocate_gradients(
    dout: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The gradient of `x` is always computed."""
    need_filter = rest[-2] or rest[-1]
    batch, channels, length = x.shape
    return (
        x.new_empty(batch, length, channels).transpose(1, 2),
        weight.new_empty(weight.shape) if need_filter else None,
        bias.new_empty(bias.shape) if need_filter and bias is not None else None,
    )


def _backward(
    gradients: tuple[Tensor, Tensor | None, Tensor | None],
    dout: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor | None,
    silu: bool,
    *needs: bool,
) -> None:
    dx, dweight, dbias = gradients
    if x.numel() == 0:
        zero(dweight, dbias)
        return
    batch, channels, length = x.shape
    width = weight.shape[1]
    x, dout = _rows(x), _rows(dout)
    plan = backward_plan(length, channels)
    spans = cdiv(length, plan.span)
    partial = None if dweight is None else x.new_empty((batch * spans, 5, channels), dtype=torch.float32)
    _launch_backward(
        (cdiv(channels, plan.columns), spans, batch),
        (dout, x, weight.contiguous(), dense(bias), document_positions(cu_seqlens, length), dx, partial),
        (dout.stride(0), dout.stride(1), x.stride(0), x.stride(1)),
        (length,),
        (channels, width, silu, *are_given(bias, cu_seqlens, dweight), *plan.tile),
        plan.warps,
    )
    if partial is not None and dweight is not None:
        write_filter_gradients(partial.sum(0), dweight, dbias, _TAPS)


_causal_conv1d = differentiable_op(
    "causal_conv1d(Tensor x, Tensor weight, Tensor? bias, Tensor? cu_seqlens, bool silu) -> Tensor",
    allocate=_allocate,
    launch=_forward,
    allocate_gradients=_allocate_gradients,
    launch_backward=_backward,
    differentiable=3,
)


def _run(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, cu_seqlens: Tensor | None) -> Tensor:
    """For float32, bfloat16 and float16, also mixed, and filters of up to four taps.

    Reads and returns [B, D, S] views of [B, S, D] memory, the layout of a projection's output; hidden states whose
    channels are not adjacent are copied into that layout first.
    """
    require_floats(_LABEL, hidden_states=x, weight=weight, bias=bias)
    channels = x.shape[1]
    if weight.dim() != 2 or weight.shape[0] != channels or not 1 <= weight.shape[1] <= _TAPS:
        wanted = f"({channels}, 1 to {_TAPS})"
        reject(_LABEL, "weight", f"its shape is {tuple(weight.shape)}, not {wanted}", "use torch_packed or eager")
    if bias is not None and bias.shape != (channels,):
        reject(_LABEL, "bias", f"its shape is {tuple(bias.shape)}, not ({channels},)", "use eager")
    return _causal_conv1d(x, weight, bias, cu_seqlens, activation is not None)


standard = kernel_of(_LABEL, _run)
