"""RMSNorm in plain torch with few passes, for any device; faster than eager on CPU.

Backward computes sum_i dy_ij x_ij rstd_i for the weight and sum_j dy_ij x_ij w_j for x from one elementwise
multiplication; autograd would save and read four intermediates of the eager code.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from opslot.ops._common.arguments import in_one_dtype, reject, upcast, without_autocast
from opslot.ops._common.custom_op import in_dtype, once_differentiable

_LABEL = "rms_norm_implementation='torch_fused'"


def _multiply(x: Tensor, y: Tensor, out: Tensor) -> Tensor:
    """`x * y`, in `out` except in compiled code, where `out` must be contiguous and not be used under autograd."""
    return x * y if torch.compiler.is_compiling() else torch.mul(x, y, out=out)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_states: Tensor, weight: Tensor, eps: float, weight_offset: bool, cast_after_weight: bool
    ) -> Tensor:
        x = upcast(hidden_states)
        # Not vector_norm, which needs a pass less: its error grows with the row size, to 50 times that of eager code at
        # 16384 equal values.
        squares = x.square()
        rstd = squares.mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(hidden_states, weight, rstd)
        ctx.weight_offset = weight_offset
        normalized = _multiply(x, rstd, out=squares)
        if cast_after_weight:
            scale = 1.0 + upcast(weight) if weight_offset else weight
            return in_dtype(_multiply(normalized, scale, out=normalized), hidden_states.dtype)
        normalized = normalized.to(hidden_states.dtype)
        out_dtype = torch.promote_types(normalized.dtype, weight.dtype)
        if out_dtype != normalized.dtype:
            return normalized * weight
        return _multiply(normalized, weight, out=normalized)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        hidden_states, weight, rstd = ctx.saved_tensors
        width = hidden_states.shape[-1]
        # torch's matmul takes one dtype: float64 if any of them has it.
        x, dy, scale = in_one_dtype(upcast(hidden_states), upcast(dout), upcast(weight))
        if ctx.weight_offset:
            scale = scale + 1.0
        product = dy * x
        dx = dweight = None
        # Autocast would run the matmul in 16 bits.
        with without_autocast(dout):
            along = torch.matmul(product, scale)
        along = along.unsqueeze(-1).mul_(rstd.pow(3)).div_(-width)
        if ctx.needs_input_grad[1]:
            # Not a matrix-vector matmul: its sequential sum over rows has twice the error of torch.sum's tree.
            dweight = product.mul_(rstd).reshape(rstd.numel(), width).sum(0).to(weight.dtype)
        if ctx.needs_input_grad[0]:
            dx_fp32 = _multiply(dy, scale, out=product).mul_(rstd).addcmul_(x, along)
            dx = dx_fp32.to(hidden_states.dtype)
        return dx, dweight, None, None, None


def _apply(
    hidden_states: Tensor, weight: Tensor, eps: float, *, weight_offset: bool = False, cast_after_weight: bool = False
) -> Tensor:
    if weight.shape != hidden_states.shape[-1:]:
        found = f"its shape is {tuple(weight.shape)}, not {tuple(hidden_states.shape[-1:])}"
        reject(_LABEL, "weight", found, "give it one element a channel, or use eager")
    return _RMSNorm.apply(hidden_states, weight, eps, weight_offset, cast_after_weight)


def standard(hidden_states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`op.standard` for every floating dtype."""
    return _apply(hidden_states, weight, eps)


def weight_offset(hidden_states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`op.weight_offset` for every floating dtype."""
    return _apply(hidden_states, weight, eps, weight_offset=True, cast_after_weight=True)


def cast_after_weight(hidden_states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`op.cast_after_weight` for every floating dtype."""
    return _apply(hidden_states, weight, eps, cast_after_weight=True)
