"""Rotary position embedding in Triton: queries and keys in one launch, each read once and written once.

A program turns all heads of one token, so the token's angles are loaded once; tensors are addressed by their own
strides, so transposed views cost no copy. Backward is the same kernel turning the other way.

How pairs lie in memory is two numbers on each side of the kernel: the members of pair i are at i * STEP and at
i * STEP + GAP; halves have STEP 1 and GAP R/2, interleaved pairs STEP 2 and GAP 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from opslot.ops._common.library import opaque_op, refuse
from opslot.ops.rotary_pos_emb.op import merge_sections

DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
_LABEL = "rotary_pos_emb_implementation='triton'"
# Elements of the tile of one half of a program's heads; more heads go to further programs of the same token.
_TILE = 4096


@triton.jit
def _turn(
    x_ptr,
    out_ptr,
    x_head_stride,
    out_head_stride,
    first_head,
    heads,
    cos_first,
    cos_second,
    sin_first,
    sin_second,
    INVERSE: tl.constexpr,
    IN_STEP: tl.constexpr,
    IN_GAP: tl.constexpr,
    OUT_STEP: tl.constexpr,
    OUT_GAP: tl.constexpr,
    HALF: tl.constexpr,
    HALF_TILE: tl.constexpr,
    PASS: tl.constexpr,
    PASS_TILE: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Turn heads [first_head, first_head + HEADS) of one token; channels from 2 HALF on are copied."""
    head = first_head + tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, HALF_TILE)[None, :]
    mask = (head < heads) & (pair < HALF)
    source = x_ptr + head.to(tl.int64) * x_head_stride + pair * IN_STEP
    target = out_ptr + head.to(tl.int64) * out_head_stride + pair * OUT_STEP
    first = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + IN_GAP, mask=mask, other=0.0).to(tl.float32)
    if INVERSE:
        turned_first = first * cos_first + second * sin_second
        turned_second = second * cos_second - first * sin_first
    else:
        turned_first = first * cos_first - second * sin_first
        turned_second = second * cos_second + first * sin_second
    tl.store(target, turned_first.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(target + OUT_GAP, turned_second.to(out_ptr.dtype.element_ty), mask=mask)
    if PASS > 0:
        channel = 2 * HALF + tl.arange(0, PASS_TILE)[None, :]
        mask = (head < heads) & (channel < 2 * HALF + PASS)
        passed = tl.load(x_ptr + head.to(tl.int64) * x_head_stride + channel, mask=mask, other=0.0)
        target = out_ptr + head.to(tl.int64) * out_head_stride + channel
        tl.store(target, passed.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens", "q_heads", "k_heads"])
def _rotary_kernel(
    q_ptr,
    k_ptr,
    cos_ptr,
    sin_ptr,
    q_out_ptr,
    k_out_ptr,
    tokens,
    q_heads,
    k_heads,
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
    INVERSE: tl.constexpr,
    SHARED_ANGLES: tl.constexpr,
    IN_STEP: tl.constexpr,
    IN_GAP: tl.constexpr,
    OUT_STEP: tl.constexpr,
    OUT_GAP: tl.constexpr,
    HALF: tl.constexpr,
    HALF_TILE: tl.constexpr,
    PASS: tl.constexpr,
    PASS_TILE: tl.constexpr,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
):
    batch = (tl.program_id(0) // tokens).to(tl.int64)
    token = (tl.program_id(0) % tokens).to(tl.int64)
    group = tl.program_id(1)
    pair = tl.arange(0, HALF_TILE)[None, :]
    inside = pair < HALF
    cos_ptr += batch * cos_batch_stride + token * cos_token_stride
    sin_ptr += batch * sin_batch_stride + token * sin_token_stride
    cos_first = tl.load(cos_ptr + pair, mask=inside, other=0.0).to(tl.float32)
    sin_first = tl.load(sin_ptr + pair, mask=inside, other=0.0).to(tl.float32)
    if SHARED_ANGLES:
        cos_second, sin_second = cos_first, sin_first
    else:
        cos_second = tl.load(cos_ptr + HALF + pair, mask=inside, other=0.0).to(tl.float32)
        sin_second = tl.load(sin_ptr + HALF + pair, mask=inside, other=0.0).to(tl.float32)
    _turn(
        q_ptr + batch * q_batch_stride + token * q_token_stride,
        q_out_ptr + batch * q_out_batch_stride + token * q_out_token_stride,
        q_head_stride,
        q_out_head_stride,
        group * Q_HEADS,
        q_heads,
        cos_first,
        cos_second,
        sin_first,
        sin_second,
        INVERSE,
        IN_STEP,
        IN_GAP,
        OUT_STEP,
        OUT_GAP,
        HALF,
        HALF_TILE,
        PASS,
        PASS_TILE,
        Q_HEADS,
    )
    if K_HEADS > 0:
        _turn(
            k_ptr + batch * k_batch_stride + token * k_token_stride,
            k_out_ptr + batch * k_out_batch_stride + token * k_out_token_stride,
            k_head_stride,
            k_out_head_stride,
            group * K_HEADS,
            k_heads,
            cos_first,
            cos_second,
            sin_first,
            sin_second,
            INVERSE,
            IN_STEP,
            IN_GAP,
            OUT_STEP,
            OUT_GAP,
            HALF,
            HALF_TILE,
            PASS,
            PASS_TILE,
            K_HEADS,
        )


def _empty_like(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Like `x` in its order of dimensions, with adjacent channels and no gaps."""
    if x.stride(1) < x.stride(2):
        return torch.empty_like(x.transpose(1, 2), dtype=dtype, memory_format=torch.contiguous_format).transpose(1, 2)
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def _fake_rotary(
    tensors: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    dtype: torch.dtype,
    interleaved: bool,
    inverse: bool,
) -> list[Tensor]:
    return [_empty_like(x, dtype) for x in tensors]


@opaque_op(
    "rotary_pos_emb(Tensor[] tensors, Tensor cos, Tensor sin, ScalarType dtype, bool interleaved, bool inverse)"
    " -> Tensor[]",
    fake=_fake_rotary,
)
def _rotary(
    tensors: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    dtype: torch.dtype,
    interleaved: bool,
    inverse: bool,
) -> list[Tensor]:
    """Turn one or two tensors [B, heads, S, D] by angles [B or 1, S, R]; results in `dtype`."""
    outs = _fake_rotary(tensors, cos, sin, dtype, interleaved, inverse)
    tensors = [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]
    if cos.stride(-1) != 1 or sin.stride(-1) != 1:
        cos, sin = cos.contiguous(), sin.contiguous()
    q, k = tensors[0], tensors[-1]
    q_out, k_out = outs[0], outs[-1]
    batch, q_heads, tokens, width = q.shape
    k_heads = k.shape[1] if len(tensors) == 2 else 0
    half = cos.shape[-1] // 2
    half_tile = triton.next_power_of_2(half)
    groups = triton.cdiv(max(q_heads, k_heads), max(1, _TILE // half_tile))
    q_tile = triton.next_power_of_2(triton.cdiv(q_heads, groups))
    k_tile = triton.next_power_of_2(triton.cdiv(k_heads, groups)) if k_heads else 0
    halves, pairs = (1, half), (2, 1)
    step_in, gap_in = pairs if interleaved and not inverse else halves
    step_out, gap_out = pairs if interleaved and inverse else halves
    spare = width - 2 * half
    if batch * tokens == 0:
        return outs
    _rotary_kernel[(batch * tokens, groups)](
        q,
        k,
        cos,
        sin,
        q_out,
        k_out,
        tokens,
        q_heads,
        k_heads,
        *_strides(q),
        *_strides(k),
        *_strides(q_out),
        *_strides(k_out),
        cos.stride(0) if cos.shape[0] > 1 else 0,
        cos.stride(1),
        sin.stride(0) if sin.shape[0] > 1 else 0,
        sin.stride(1),
        INVERSE=inverse,
        SHARED_ANGLES=interleaved,
        IN_STEP=step_in,
        IN_GAP=gap_in,
        OUT_STEP=step_out,
        OUT_GAP=gap_out,
        HALF=half,
        HALF_TILE=half_tile,
        PASS=spare,
        PASS_TILE=triton.next_power_of_2(max(spare, 1)),
        Q_HEADS=q_tile,
        K_HEADS=k_tile,
        num_warps=min(8, max(1, q_tile * half_tile // 1024)),
    )
    return outs


def _strides(x: Tensor) -> tuple[int, int, int]:
    return x.stride(0), x.stride(2), x.stride(1)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, keep_dtype: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.set_materialize_grads(False)
        ctx.interleaved, ctx.dtype = interleaved, q.dtype
        dtype = q.dtype if keep_dtype else torch.promote_types(q.dtype, cos.dtype)
        q_out, k_out = _rotary([q, k], cos, sin, dtype, interleaved, False)
        return q_out, k_out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *douts: Tensor | None) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        wanted = [i for i in (0, 1) if ctx.needs_input_grad[i] and douts[i] is not None]
        grads: list[Tensor | None] = [None] * 6
        if wanted:
            found = _rotary([douts[i] for i in wanted], cos, sin, ctx.dtype, ctx.interleaved, True)
            for i, grad in zip(wanted, found, strict=True):
                grads[i] = grad
        return tuple(grads)


def _check(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Everything that would otherwise be a wrong number; `q` and `k` are [B, heads, S, D] here."""
    for name, x in (("q", q), ("k", k), ("cos", cos), ("sin", sin)):
        if x.dtype not in DTYPES:
            refuse(_LABEL, name, f"its dtype is {x.dtype}, not float32, bfloat16 or float16", "use eager")
        if x.ndim != (4 if name in "qk" else 3):
            refuse(_LABEL, name, f"its shape is {tuple(x.shape)}", "use eager, or the layout of the op's contract")
    if q.dtype != k.dtype:
        refuse(_LABEL, "k", f"its dtype is {k.dtype} beside q's {q.dtype}", "use eager")
    batch, _, tokens, width = q.shape
    if (k.shape[0], k.shape[2], k.shape[3]) != (batch, tokens, width):
        refuse(_LABEL, "k", f"its shape is {tuple(k.shape)} beside q's {tuple(q.shape)}", "use eager")
    for name, x in (("cos", cos), ("sin", sin)):
        if x.shape != cos.shape or x.shape[0] not in (1, batch) or x.shape[1] != tokens:
            refuse(_LABEL, name, f"its shape is {tuple(x.shape)} for q's {tuple(q.shape)}", "use eager")
        if x.requires_grad:
            refuse(_LABEL, name, "it requires a gradient, and only q and k receive one", "use eager")


def _apply(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int, *, interleaved: bool, partial: bool
) -> tuple[Tensor, Tensor]:
    if unsqueeze_dim not in (1, 2):
        refuse(_LABEL, "unsqueeze_dim", f"it is {unsqueeze_dim}, not 1 or 2", "use eager")
    swap = unsqueeze_dim == 2
    if swap:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    _check(q, k, cos, sin)
    rotary, width = cos.shape[-1], q.shape[-1]
    if rotary % 2 or rotary > width or (rotary != width and not partial):
        refuse(_LABEL, "cos", f"it has {rotary} channels for heads of {width}", "use eager, or the partial variant")
    q, k = _Rotary.apply(q, k, cos, sin, interleaved, False)
    return (q.transpose(1, 2), k.transpose(1, 2)) if swap else (q, k)


def full(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """`op.full` for float32, bfloat16 and float16, computed in fp32."""
    return _apply(q, k, cos, sin, unsqueeze_dim, interleaved=False, partial=False)


def partial(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """`op.partial`, within the limits of `full`."""
    return _apply(q, k, cos, sin, unsqueeze_dim, interleaved=False, partial=True)


def interleaved(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """`op.interleaved`, within the limits of `full`."""
    return _apply(q, k, cos, sin, unsqueeze_dim, interleaved=True, partial=False)


def multimodal(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, mrope_section: Sequence[int], unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """`op.multimodal`: the angles, small beside q and k, are merged by torch; then as `full`."""
    return full(q, k, merge_sections(cos, mrope_section), merge_sections(sin, mrope_section), unsqueeze_dim)


def vision(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """`op.vision` for float32, bfloat16 and float16, computed in fp32."""
    batched = [x.transpose(0, 1).unsqueeze(0) for x in (q, k)]
    angles = [x.unsqueeze(0) for x in (cos, sin)]
    _check(*batched, *angles)
    if cos.shape[-1] != q.shape[-1]:
        refuse(_LABEL, "cos", f"it has {cos.shape[-1]} channels for heads of {q.shape[-1]}", "use eager")
    q_out, k_out = _Rotary.apply(*batched, *angles, False, True)
    return q_out.squeeze(0).transpose(0, 1), k_out.squeeze(0).transpose(0, 1)
