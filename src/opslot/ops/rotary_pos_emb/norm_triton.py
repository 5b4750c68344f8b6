"""RMSNorm of the heads of queries and keys with their rotation: one launch forward, and one backward plus a sum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from opslot.ops._common.arguments import reject, require_floats
from opslot.ops._common.custom_op import differentiable_op
from opslot.ops._common.specs import FLOATS
from opslot.ops.rotary_pos_emb.kernels.norm_rotate import NormRotation, launch_backward, launch_forward
from opslot.ops.rotary_pos_emb.triton import LABEL, check, empty_like


def _allocate(*arguments: Any) -> tuple[Tensor, Tensor]:
    given = NormRotation(*arguments)

    def like(x: Tensor, weight: Tensor) -> Tensor:
        dtype = x.dtype
        if not given.keep_dtype and dtype != given.cos.dtype:
            dtype = torch.promote_types(dtype, given.cos.dtype)
        if not given.cast_after_weight and dtype != weight.dtype:
            dtype = torch.promote_types(dtype, weight.dtype)
        return empty_like(x, dtype)

    return like(given.q, given.q_weight), like(given.k, given.k_weight)


def _allocate_gradients(dq_out: Tensor | None, dk_out: Tensor | None, *arguments: Any) -> tuple[Tensor | None, ...]:
    """Those of q and k, and those of both weights, unless neither of the two is needed."""
    q, k, q_weight, k_weight = arguments[:4]
    need_q, need_k, need_q_weight, need_k_weight = arguments[-4:]
    dq = dk = dq_weight = dk_weight = None
    if need_q or need_k:
        dq, dk = empty_like(q, q.dtype), empty_like(k, k.dtype)
    if need_q_weight or need_k_weight:
        dq_weight, dk_weight = torch.empty_like(q_weight), torch.empty_like(k_weight)
    return dq, dk, dq_weight, dk_weight


_norm_rotary = differentiable_op(
    "norm_rotary_pos_emb(Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, Tensor cos, Tensor sin, float q_eps,"
    " float k_eps, bool weight_offset, bool cast_after_weight, bool norm_last, bool keep_dtype) -> (Tensor, Tensor)",
    allocate=_allocate,
    launch=launch_forward,
    launch_backward=launch_backward,
    allocate_gradients=_allocate_gradients,
    differentiable=4,
    module=__name__,
)


def _explain(q_weight: Tensor, k_weight: Tensor, width: int) -> NoReturn:
    require_floats(LABEL, q_weight=q_weight, k_weight=k_weight)
    name, weight = ("k_weight", k_weight) if q_weight.shape == (width,) else ("q_weight", q_weight)
    reject(LABEL, name, f"its shape is {tuple(weight.shape)}, not {(width,)}", "use eager")


def _variant(
    *, norm_last: bool = False, partial: bool = False, keep_dtype: bool = False
) -> Callable[..., tuple[Tensor, Tensor]]:
    """The kernel of a variant; with `norm_last`, RMSNorm comes after the rotation."""

    def norm_and_rotate(
        q: Tensor,
        k: Tensor,
        cos: Tensor,
        sin: Tensor,
        q_weight: Tensor,
        k_weight: Tensor,
        q_eps: float,
        k_eps: float,
        weight_offset: bool = False,
        cast_after_weight: bool = False,
        unsqueeze_dim: int = 1,
    ) -> tuple[Tensor, Tensor]:
        """For float32, bfloat16 and float16, computed in fp32."""
        if unsqueeze_dim == 2:
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        elif unsqueeze_dim != 1:
            reject(LABEL, "unsqueeze_dim", f"it is {unsqueeze_dim}, not 1 or 2", "use eager")
        check(q, k, cos, sin)
        width, rotary = q.shape[-1], cos.shape[-1]
        if rotary != width and (not partial or rotary % 2 or rotary > width):
            found = f"it has {rotary} channels for heads of {width}"
            reject(LABEL, "cos", found, "use eager, or the partial variant")
        if not q_weight.shape == k_weight.shape == q.shape[-1:] or not {q_weight.dtype, k_weight.dtype} <= FLOATS:
            _explain(q_weight, k_weight, width)
        cast_after = cast_after_weight or weight_offset
        options = float(q_eps), float(k_eps), weight_offset, cast_after, norm_last, keep_dtype
        q, k = _norm_rotary(q, k, q_weight, k_weight, cos, sin, *options)
        return (q.transpose(1, 2), k.transpose(1, 2)) if unsqueeze_dim == 2 else (q, k)

    return norm_and_rotate


norm_full = _variant()
norm_full_fp32 = _variant(keep_dtype=True)
norm_partial = _variant(partial=True)
full_norm = _variant(norm_last=True)
full_fp32_norm = _variant(norm_last=True, keep_dtype=True)
