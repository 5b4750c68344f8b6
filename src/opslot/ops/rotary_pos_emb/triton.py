"""Rotary position embedding in Triton: queries and keys in one launch, each read once and written once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from opslot.ops._common.arguments import reject
from opslot.ops._common.custom_op import launch_op, once_differentiable
from opslot.ops._common.specs import FLOATS, unsupported_dtype
from opslot.ops.rotary_pos_emb.kernels.rotate import launch_rotation
from opslot.ops.rotary_pos_emb.op import merge_sections, with_batch

LABEL = "rotary_pos_emb_implementation='triton'"


def empty_like(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Dense, with the dimension order of `x`; contiguous if that would not keep channels adjacent."""
    out = torch.empty_like(x, dtype=dtype)
    return out if out.stride(-1) == 1 else torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


_rotary = launch_op(
    "rotary_pos_emb(Tensor q, Tensor? k, Tensor cos, Tensor sin, ScalarType dtype, int rotary, bool interleaved_in,"
    " bool interleaved_out, bool last, bool inverse) -> (Tensor, Tensor)",
    lambda q, k, cos, sin, dtype, *_: (empty_like(q, dtype), None if k is None else empty_like(k, dtype)),
    launch_rotation,
)


class _Rotary(torch.autograd.Function):
    """Not a `differentiable_op`: backward is the same op with the inverse rotation and does not need q and k."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, keep_dtype: bool, *form: Any
    ) -> tuple[Tensor, Tensor | None]:
        ctx.save_for_backward(cos, sin)
        ctx.set_materialize_grads(False)
        ctx.form, ctx.dtype = form, q.dtype
        dtype = q.dtype if keep_dtype or q.dtype == cos.dtype else torch.promote_types(q.dtype, cos.dtype)
        q_out, k_out = _rotary(q, k, cos, sin, dtype, *form, False)
        # In compiled code the op returns an empty tensor, which torch 2.11 would take for the first output.
        return q_out, None if k is None else k_out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor | None, dk: Tensor | None) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        need_q = ctx.needs_input_grad[0] and dq is not None
        need_k = ctx.needs_input_grad[1] and dk is not None
        if need_q:
            dq, dk = _rotary(dq, dk if need_k else None, cos, sin, ctx.dtype, *ctx.form, True)
        elif need_k:
            dk, _ = _rotary(dk, None, cos, sin, ctx.dtype, *ctx.form, True)
        return dq if need_q else None, dk if need_k else None, *[None] * 7


def check(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, same_width: bool = True) -> None:
    """Raise for arguments that would give wrong results; `q` and `k` are [B, heads, S, D] here."""
    if q.ndim == k.ndim == 4 and q.dtype == k.dtype and cos.shape == sin.shape and cos.ndim == 3:
        batch, _, tokens, width = q.shape
        k_batch, _, k_tokens, k_width = k.shape
        rows, cos_tokens, _ = cos.shape
        if (
            (k_batch, k_tokens, cos_tokens) == (batch, tokens, tokens)
            and (k_width == width or not same_width)
            and rows in (1, batch)
            and q.dtype in FLOATS
            and cos.dtype in FLOATS
            and sin.dtype in FLOATS
            and not cos.requires_grad
            and not sin.requires_grad
        ):
            return
    _explain(q, k, cos, sin, same_width)


def _explain(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, same_width: bool) -> NoReturn:
    first = "x" if k is q else "q"
    for name, x in ((first, q), ("k", k), ("cos", cos), ("sin", sin)):
        if x.dtype not in FLOATS:
            reject(LABEL, name, unsupported_dtype(x.dtype), "use eager")
        if x.ndim != (4 if name in "qkx" else 3):
            reject(LABEL, name, f"its shape is {tuple(x.shape)}", "use eager, or the layout of the op's contract")
    if q.dtype != k.dtype:
        reject(LABEL, "k", f"its dtype is {k.dtype} beside q's {q.dtype}", "use eager")
    batch, _, tokens, width = q.shape
    if (k.shape[0], k.shape[2]) != (batch, tokens) or (same_width and k.shape[3] != width):
        reject(LABEL, "k", f"its shape is {tuple(k.shape)} beside q's {tuple(q.shape)}", "use eager")
    name, x = ("cos", cos) if cos.requires_grad else ("sin", sin)
    if x.requires_grad:
        reject(LABEL, name, "it requires a gradient, and only q and k receive one", "use eager")
    name, x = ("sin", sin) if sin.shape != cos.shape else ("cos", cos)
    reject(LABEL, name, f"its shape is {tuple(x.shape)} for {first}'s {tuple(q.shape)}", "use eager")


def _apply(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    unsqueeze_dim: int,
    *,
    interleaved: tuple[bool, bool] = (False, False),
    half_cos_sin: bool = False,
    partial: bool = False,
    last: bool = False,
    keep_dtype: bool = False,
) -> tuple[Tensor, Any]:
    """Rotate `q`, and `k` unless it is None.

    Args:
        interleaved: whether input and output have GPT-J layout (interleaved); else NeoX (half).
        half_cos_sin: `cos` and `sin` have one element per pair.
        partial: `cos` and `sin` may have fewer channels than a head.
        last: as `partial`, the last channels are rotated, and `k` may have fewer channels than `q`.
        keep_dtype: return the dtype of `q` whatever the dtype of `cos`.
    """
    cos, sin, unsqueeze_dim = with_batch(cos, sin, unsqueeze_dim)
    if unsqueeze_dim not in (1, 2):
        reject(LABEL, "unsqueeze_dim", f"it is {unsqueeze_dim}, not 1 or 2", "use eager")
    swap = unsqueeze_dim == 2
    if swap:
        q, k = q.transpose(1, 2), None if k is None else k.transpose(1, 2)
    check(q, q if k is None else k, cos, sin, same_width=not last)
    rotary, width = cos.shape[-1] * (2 if half_cos_sin else 1), q.shape[-1]
    if last and k is not None:
        width = min(width, k.shape[-1])
    if rotary % 2 or rotary > width or (rotary != width and not (partial or last)):
        found = f"it has {cos.shape[-1]} channels for heads of {width}"
        reject(LABEL, "cos", found, "use eager, or the partial variant")
    q, k = _Rotary.apply(q, k, cos, sin, keep_dtype, rotary, *interleaved, last)
    return (q.transpose(1, 2), None if k is None else k.transpose(1, 2)) if swap else (q, k)


def _of_pairs(**form: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    """The kernel of a variant of q and k; `form` as for `_apply`."""

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        """For float32, bfloat16 and float16, computed in fp32."""
        if q.dtype == k.dtype or not {q.dtype, k.dtype} <= FLOATS:
            return _apply(q, k, cos, sin, unsqueeze_dim, **form)
        # Under autocast a layer norm of the keys alone returns float32 (the indexer of HY-V4).
        rotated_q, _ = _apply(q, None, cos, sin, unsqueeze_dim, **form)
        return rotated_q, _apply(k, None, cos, sin, unsqueeze_dim, **form)[0]

    return rotate


_GPTJ: dict[str, Any] = {"interleaved": (True, True), "half_cos_sin": True}

full = _of_pairs()
full_fp32 = _of_pairs(keep_dtype=True)
half_cos_sin = _of_pairs(half_cos_sin=True)
partial = _of_pairs(partial=True)
partial_last = _of_pairs(last=True)
gptj_to_neox = _of_pairs(interleaved=(True, False))
gptj_to_neox_last = _of_pairs(interleaved=(True, False), last=True)
gptj = _of_pairs(**_GPTJ, partial=True)
gptj_fp32 = _of_pairs(**_GPTJ, partial=True, keep_dtype=True)
gptj_fp32_last = _of_pairs(**_GPTJ, last=True, keep_dtype=True)


def single(x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Tensor:
    """`op.single`, within the limits of `full`."""
    return _apply(x, None, cos, sin, unsqueeze_dim)[0]


def single_gptj_fp32_last(x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Tensor:
    """`op.single_gptj_fp32_last` for float32, bfloat16 and float16."""
    return _apply(x, None, cos, sin, unsqueeze_dim, **_GPTJ, last=True, keep_dtype=True)[0]


def multimodal(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, mrope_section: Sequence[int], unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """`op.multimodal`: `cos` and `sin` are merged by torch; then as `full`."""
    return full(q, k, merge_sections(cos, mrope_section), merge_sections(sin, mrope_section), unsqueeze_dim)


def vision(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """`op.vision` for float32, bfloat16 and float16, computed in fp32."""
    q4, k4 = (x if x.ndim == 4 else x.unsqueeze(0) for x in (q, k))
    cos3, sin3 = (x if x.ndim == 3 else x.unsqueeze(0) for x in (cos, sin))
    q_out, k_out = _apply(q4, k4, cos3, sin3, 2, partial=True, keep_dtype=True)
    return (q_out, k_out) if q.ndim == 4 else (q_out.squeeze(0), k_out.squeeze(0))
