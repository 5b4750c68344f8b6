"""`fp8`: linear layers whose matmuls, one in forward and two in backward, multiply FP8 numbers.

Inputs and weights are rounded to E4M3, incoming gradients to E5M2, each tensor with one scale from its largest element
at that moment (Micikevicius et al., "FP8 Formats for Deep Learning", 2022). Sums are in float32, results in the input's
dtype. Backward keeps the input in FP8, so a layer saves half of what it saves in bf16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from opslot._base.tensor_cache import TensorCache
from opslot.ops._common.arguments import reject
from opslot.ops._common.custom_op import autograd_function, custom_op, no_view
from opslot.ops.linear.arguments import HINT, checked

_KERNEL = "linear_implementation='fp8'"
# Sizes that tensor cores multiply in FP8 are multiples of it; others are padded with zeros.
_MULTIPLE = 16
# The largest factor of a tensor: a power of two whose reciprocal, the scale, is a normal number in float32.
MOST = 2.0**126


def standard(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`op.standard`, in autocast's dtype where autocast is on.

    Raises:
        KernelError: unsupported shapes, dtypes or devices.
    """
    input, weight, bias = checked(_KERNEL, input, weight, bias)
    if input.device.type not in ("cuda", "cpu", "meta"):
        reject(_KERNEL, "input", f"it is on {input.device}, not a GPU or CPU", HINT)
    if not input.numel():
        return nn.functional.linear(input, weight, bias)
    return _linear(input, weight, bias)


def _largest(gradient: bool) -> tuple[torch.dtype, float]:
    dtype = torch.float8_e5m2 if gradient else torch.float8_e4m3fn
    return dtype, torch.finfo(dtype).max


def _padded(size: int) -> int:
    return -(-size // _MULTIPLE) * _MULTIPLE


def _with_zeros(x: Tensor, rows: bool = False) -> Tensor:
    """A contiguous matrix [T, K] with K padded, and T if `rows`."""
    right, below = _padded(x.shape[1]) - x.shape[1], (_padded(x.shape[0]) - x.shape[0]) * rows
    return nn.functional.pad(x, (0, right, 0, below)) if right or below else x.contiguous()


def _quantize(x: Tensor, gradient: bool, by_row: bool, by_column: bool) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Round a matrix to FP8.

    Args:
        x: [T, K], contiguous.
        gradient: to E5M2 instead of E4M3.

    Returns:
        x in FP8 [T, K] if `by_row`, transposed [K, T] if `by_column`, T padded with zeros to a multiple of 16; and the
        float32 scale [] that it is multiplied by again.
    """
    # Of float32, Triton 3.6 transposes the 8-bit values, and stores wrong ones on an H200; 16-bit inputs are transposed
    # before they are rounded.
    if x.device.type == "cuda" and x.dtype != torch.float32:
        from opslot.ops.linear.quantize import quantize

        outputs = _allocate(x, gradient, by_row, by_column)
        quantize(x, *outputs, _largest(gradient)[1], MOST)
        return outputs
    dtype, largest = _largest(gradient)
    amax = x.abs().amax().float()
    # Of amax near 0, the quotient is infinite.
    scale = torch.where(amax > 0, (largest / amax).clamp(max=MOST), 1.0)
    rounded = (x.float() * scale).clamp(-largest, largest)
    columns = nn.functional.pad(rounded, (0, 0, 0, _padded(len(x)) - len(x))).t().contiguous().to(dtype)
    return rounded.to(dtype) if by_row else None, columns if by_column else None, scale.reciprocal()


def _allocate(x: Tensor, gradient: bool, by_row: bool, by_column: bool) -> tuple[Tensor | None, Tensor | None, Tensor]:
    dtype, _ = _largest(gradient)
    rows, width = x.shape
    return (
        x.new_empty(rows, width, dtype=dtype) if by_row else None,
        x.new_empty(width, _padded(rows), dtype=dtype) if by_column else None,
        x.new_empty((), dtype=torch.float32),
    )


_quantized = custom_op(
    "fp8_quantize(Tensor x, bool gradient, bool by_row, bool by_column) -> (Tensor, Tensor, Tensor)",
    _quantize,
    _allocate,
)

# Projections of one input (q, k and v; gate and up) follow each other and share what it was rounded to.
_last: TensorCache[Any] = TensorCache(1)


def _quantized_input(x: Tensor, by_column: bool) -> tuple[Tensor, Tensor, Tensor]:
    """An input by row, and by column with `by_column`."""

    def quantize() -> Any:
        return _quantized(_with_zeros(x.reshape(-1, x.shape[-1])), False, True, by_column)

    return _last.get(x, quantize, by_column)


def _forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    ctx.has_bias = bias is not None
    outputs = weight.shape[0]
    x, columns, scale = _quantized_input(input, ctx.needs_input_grad[1])
    w, _, weight_scale = _quantized(_with_zeros(weight, rows=True), False, True, False)
    # Sums in the tensor cores' own precision are exact enough for outputs, not for gradients.
    out = torch._scaled_mm(
        x, w.t(), scale_a=scale, scale_b=weight_scale, out_dtype=input.dtype, use_fast_accum=input.is_cuda
    )[:, :outputs].contiguous()
    if bias is not None:
        out += bias
    ctx.save_for_backward(columns if ctx.needs_input_grad[1] else None, scale, weight)
    with no_view():
        return out.view(*input.shape[:-1], outputs)


def _backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    columns, scale, weight = ctx.saved_tensors
    need_input, need_weight, need_bias = ctx.needs_input_grad
    outputs, width = weight.shape
    rows = dout.reshape(-1, outputs)
    d, d_columns, d_scale = _quantized(_with_zeros(rows), True, need_input, need_weight)
    grad_input = grad_weight = None
    if need_input:
        _, w_columns, weight_scale = _quantized(_with_zeros(weight, rows=True), False, False, True)
        grad_input = torch._scaled_mm(d, w_columns.t(), scale_a=d_scale, scale_b=weight_scale, out_dtype=dout.dtype)
        grad_input = grad_input[:, :width].contiguous().view(*dout.shape[:-1], width)
    if need_weight:
        grad_weight = torch._scaled_mm(d_columns, columns.t(), scale_a=d_scale, scale_b=scale, out_dtype=dout.dtype)
        grad_weight = grad_weight[:outputs, :width].contiguous()
    return grad_input, grad_weight, rows.sum(0) if need_bias and ctx.has_bias else None


_linear = autograd_function("fp8_linear", _forward, _backward, __name__)
