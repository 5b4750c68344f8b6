"""Rotary position embedding for any device in three passes of plain torch; measured worth it on CPU.

One product makes the result and two in-place products add the turned halves; no rotated copy, and backward is the same
with the angle's sign changed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from opslot.ops._common.library import once_differentiable, refuse

_LABEL = "rotary_pos_emb_implementation='torch_fused'"


def _turn(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    """`x` [..., D] turned in its first `cos.shape[-1]` channels, by minus the angle if `inverse`."""
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
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.set_materialize_grads(False)
        ctx.dtypes = q.dtype, k.dtype
        return _turn(q, cos, sin, False), _turn(k, cos, sin, False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *douts: Tensor | None) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        grads = (
            _turn(dout, cos, sin, True).to(dtype) if need and dout is not None else None
            for dout, dtype, need in zip(douts, ctx.dtypes, ctx.needs_input_grad[:2], strict=True)
        )
        return *grads, None, None


def _apply(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int) -> tuple[Tensor, Tensor]:
    for name, angles in (("cos", cos), ("sin", sin)):
        if angles.requires_grad:
            refuse(_LABEL, name, "it requires a gradient, and only q and k receive one", "use eager")
    return _Rotary.apply(q, k, cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim))


def full(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """`op.full` for every floating dtype."""
    rotary = cos.shape[-1]
    if rotary % 2 or not rotary == q.shape[-1] == k.shape[-1]:
        found = f"it has {rotary} channels for heads of {q.shape[-1]} and {k.shape[-1]}"
        refuse(_LABEL, "cos", found, "use eager, or the partial variant")
    return _apply(q, k, cos, sin, unsqueeze_dim)


def partial(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """`op.partial` for every floating dtype."""
    rotary, width = cos.shape[-1], q.shape[-1]
    if rotary % 2 or rotary > width:
        refuse(_LABEL, "cos", f"it has {rotary} channels for heads of {width}", "use eager")
    return _apply(q, k, cos, sin, unsqueeze_dim)
