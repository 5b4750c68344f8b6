"""Rotary position embedding in plain torch, for any device; faster than eager on CPU.

One multiplication and two in-place additions, without a rotated copy. Backward is the inverse rotation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from opslot.ops._common.arguments import reject
from opslot.ops._common.custom_op import in_dtype, once_differentiable, variadic

_LABEL = "rotary_pos_emb_implementation='torch_fused'"


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    """`x` [..., D] with its first `cos.shape[-1]` channels rotated, in the opposite direction if `inverse`."""
    width = cos.shape[-1]
    half = width // 2
    if width == x.shape[-1]:
        out = x * cos
    else:
        out = x.to(torch.promote_types(x.dtype, cos.dtype), copy=True)
        out[..., :width].mul_(cos)
    first, second = sin[..., :half], sin[..., half:]
    sign = -1 if inverse else 1
    if inverse:
        first, second = second, first
    out[..., :half].addcmul_(x[..., half:width], first, value=-sign)
    out[..., half:width].addcmul_(x[..., :half], second, value=sign)
    return out


class _Rotary(torch.autograd.Function):
    @staticmethod
    @variadic
    def forward(ctx: Any, cos: Tensor, sin: Tensor, keep_dtype: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        ctx.set_materialize_grads(False)
        ctx.dtypes = [x.dtype for x in tensors]
        rotated = (_rotate(x, cos, sin, False) for x in tensors)
        return tuple(in_dtype(out, x.dtype) if keep_dtype else out for x, out in zip(tensors, rotated, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *douts: Tensor | None) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        grads = (
            _rotate(dout, cos, sin, True).to(dtype) if need and dout is not None else None
            for dout, dtype, need in zip(douts, ctx.dtypes, ctx.needs_input_grad[3:], strict=True)
        )
        return None, None, None, *grads


def _apply(cos: Tensor, sin: Tensor, unsqueeze_dim: int, *tensors: Tensor, keep_dtype: bool = False) -> Any:
    """The rotated `tensors`, as a tuple."""
    for name, x in (("cos", cos), ("sin", sin)):
        if x.requires_grad:
            reject(_LABEL, name, "it requires a gradient, and only q and k receive one", "use eager")
    return _Rotary.apply(cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim), keep_dtype, *tensors)


def _check_width(cos: Tensor, *tensors: Tensor, repeats: int = 1) -> None:
    """Raise for heads of an odd size, or whose size is not `repeats` times that of `cos`."""
    widths = [x.shape[-1] for x in tensors]
    if widths[0] % 2 or any(width != repeats * cos.shape[-1] for width in widths):
        found = f"it has {cos.shape[-1]} channels for heads of {' and '.join(map(str, widths))}"
        reject(_LABEL, "cos", found, "use eager, or the partial variant")


def full(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """`op.full` for every floating dtype."""
    _check_width(cos, q, k)
    return _apply(cos, sin, unsqueeze_dim, q, k)


def full_fp32(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """`op.full_fp32` for every floating dtype."""
    _check_width(cos, q, k)
    dtype = torch.promote_types(torch.promote_types(q.dtype, cos.dtype), torch.float32)
    return _apply(cos.to(dtype), sin.to(dtype), unsqueeze_dim, q, k, keep_dtype=True)


def single(x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Tensor:
    """`op.single` for every floating dtype."""
    _check_width(cos, x)
    return _apply(cos, sin, unsqueeze_dim, x)[0]


def half_cos_sin(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """`op.half_cos_sin` for every floating dtype; `cos` and `sin` are repeated first."""
    _check_width(cos, q, k, repeats=2)
    return _apply(torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1), unsqueeze_dim, q, k)


def partial(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """`op.partial` for every floating dtype."""
    rotary, width = cos.shape[-1], q.shape[-1]
    if rotary % 2 or rotary > width:
        reject(_LABEL, "cos", f"it has {rotary} channels for heads of {width}", "use eager")
    return _apply(cos, sin, unsqueeze_dim, q, k)
