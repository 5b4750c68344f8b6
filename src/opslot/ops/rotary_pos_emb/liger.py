"""Liger-Kernel's rotary embedding, on copies: Liger overwrites its arguments, in forward and backward."""

from __future__ import annotations

from typing import Any

import torch
from liger_kernel.ops.rope import rope_backward, rope_forward
from torch import Tensor

from opslot.ops._common.arguments import reject
from opslot.ops._common.custom_op import once_differentiable
from opslot.ops.rotary_pos_emb.op import with_batch

_LABEL = "rotary_pos_emb_implementation='liger_kernel'"


def _copy(x: Tensor) -> Tensor:
    """A copy of [B, heads, S, D] with the memory order that Liger uses, [B, S, heads, D]."""
    return x.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        q_out, k_out, cos, sin = rope_forward(_copy(q), _copy(k), cos, sin)
        ctx.save_for_backward(cos, sin)
        return q_out, k_out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
        dq, dk = rope_backward(_copy(dq), _copy(dk), *ctx.saved_tensors)
        return dq, dk, None, None


def full(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """`op.full`; mixed dtypes are promoted first, since Liger returns those of `q` and `k`."""
    cos, sin, unsqueeze_dim = with_batch(cos, sin, unsqueeze_dim)
    if unsqueeze_dim not in (1, 2):
        reject(_LABEL, "unsqueeze_dim", f"it is {unsqueeze_dim}, not 1 or 2", "use eager")
    if cos.shape[-1] != q.shape[-1]:
        found = f"it has {cos.shape[-1]} channels for heads of {q.shape[-1]}"
        reject(_LABEL, "cos", found, "use the partial variant")
    if not q.dtype == k.dtype == cos.dtype:
        q, k = (x.to(torch.promote_types(x.dtype, cos.dtype)) for x in (q, k))
        cos, sin = cos.to(q.dtype), sin.to(q.dtype)
    if unsqueeze_dim == 1:
        return _Rotary.apply(q, k, cos, sin)
    q_out, k_out = _Rotary.apply(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    return q_out.transpose(1, 2), k_out.transpose(1, 2)
