"""Rotary position embedding in Triton: queries and keys in one launch, each read once and written once.

A program rotates all heads of one token, so cos and sin are loaded once. Tensors may have any strides, so transposed
views are not copied. Backward is the same kernel with the inverse rotation.

Strides are passed in units of UNIT elements, a constexpr that divides all of them. Otherwise strides that are not
multiples of 16, as with heads of 72 channels, would cause 2-byte instead of 16-byte loads.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import triton
import triton.language as tl
from torch import Tensor

from opslot._base.kernel_launch import KernelLauncher, cdiv
from opslot.ops._common.arguments import reject
from opslot.ops._common.custom_op import custom_op, launched, once_differentiable
from opslot.ops._common.specs import FLOATS, unsupported_dtype
from opslot.ops.rotary_pos_emb.op import merge_sections

_LABEL = "rotary_pos_emb_implementation='triton'"
# Maximum elements of a tile of one half of the heads; more heads need several programs per token.
_TILE = 4096


@triton.jit
def _load_pairs(
    row_ptr, inside, INTERLEAVED: tl.constexpr, HALF: tl.constexpr, HALF_TILE: tl.constexpr, HEADS: tl.constexpr
):
    """First and second channels of each pair, [HEADS, HALF_TILE], of the heads at `row_ptr` [HEADS, 1], in fp32."""
    if INTERLEAVED:
        channel = tl.arange(0, 2 * HALF_TILE)[None, :]
        both = tl.load(row_ptr + channel, mask=inside & (channel < 2 * HALF), other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(both, (HEADS, HALF_TILE, 2)))
    else:
        channel = tl.arange(0, HALF_TILE)[None, :]
        mask = inside & (channel < HALF)
        first = tl.load(row_ptr + channel, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(row_ptr + HALF + channel, mask=mask, other=0.0).to(tl.float32)
    return first, second


@triton.jit
def _store_pairs(
    row_ptr,
    first,
    second,
    inside,
    INTERLEAVED: tl.constexpr,
    HALF: tl.constexpr,
    HALF_TILE: tl.constexpr,
    HEADS: tl.constexpr,
):
    dtype: tl.constexpr = row_ptr.dtype.element_ty
    if INTERLEAVED:
        channel = tl.arange(0, 2 * HALF_TILE)[None, :]
        both = tl.reshape(tl.join(first, second), (HEADS, 2 * HALF_TILE))
        tl.store(row_ptr + channel, both.to(dtype), mask=inside & (channel < 2 * HALF))
    else:
        channel = tl.arange(0, HALF_TILE)[None, :]
        mask = inside & (channel < HALF)
        tl.store(row_ptr + channel, first.to(dtype), mask=mask)
        tl.store(row_ptr + HALF + channel, second.to(dtype), mask=mask)


@triton.jit
def _rotate_heads(
    x_ptr,
    out_ptr,
    x_head_stride,
    out_head_stride,
    first_head,
    heads,
    angles,
    INVERSE: tl.constexpr,
    INTERLEAVED_IN: tl.constexpr,
    INTERLEAVED_OUT: tl.constexpr,
    HALF: tl.constexpr,
    HALF_TILE: tl.constexpr,
    PASS: tl.constexpr,
    PASS_TILE: tl.constexpr,
    PASS_FIRST: tl.constexpr,
    UNIT: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Rotate heads [first_head, first_head + HEADS) of one token; PASS channels before or behind those are copied.

    `angles` are cos of the first and second channels of each pair, and sin of both.
    """
    cos_first, cos_second, sin_first, sin_second = angles
    head = first_head + tl.arange(0, HEADS)[:, None].to(tl.int64)
    inside = head < heads
    source = x_ptr + head * x_head_stride * UNIT
    target = out_ptr + head * out_head_stride * UNIT
    ROTATED: tl.constexpr = PASS if PASS_FIRST else 0
    first, second = _load_pairs(source + ROTATED, inside, INTERLEAVED_IN, HALF, HALF_TILE, HEADS)
    if INVERSE:
        rotated_first = first * cos_first + second * sin_second
        rotated_second = second * cos_second - first * sin_first
    else:
        rotated_first = first * cos_first - second * sin_first
        rotated_second = second * cos_second + first * sin_second
    _store_pairs(target + ROTATED, rotated_first, rotated_second, inside, INTERLEAVED_OUT, HALF, HALF_TILE, HEADS)
    if PASS > 0:
        COPIED: tl.constexpr = 0 if PASS_FIRST else 2 * HALF
        channel = COPIED + tl.arange(0, PASS_TILE)[None, :]
        mask = inside & (channel < COPIED + PASS)
        passed = tl.load(source + channel, mask=mask, other=0.0)
        tl.store(target + channel, passed.to(out_ptr.dtype.element_ty), mask=mask)


_STRIDES = [
    f"{tensor}_{axis}_stride"
    for tensor in ("q", "k", "q_out", "k_out", "cos", "sin")
    for axis in ("batch", "token", "head")
    if axis != "head" or tensor not in ("cos", "sin")
]


@triton.jit(do_not_specialize=[*_STRIDES, "tokens", "q_heads", "k_heads"])
def _rotary_kernel(
    q_ptr,
    k_ptr,
    cos_ptr,
    sin_ptr,
    q_out_ptr,
    k_out_ptr,
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
    tokens,
    q_heads,
    k_heads,
    INVERSE: tl.constexpr,
    INTERLEAVED_IN: tl.constexpr,
    INTERLEAVED_OUT: tl.constexpr,
    SHARED_COS: tl.constexpr,
    COS_STRIDE: tl.constexpr,
    HALF: tl.constexpr,
    HALF_TILE: tl.constexpr,
    Q_PASS: tl.constexpr,
    Q_PASS_TILE: tl.constexpr,
    K_PASS: tl.constexpr,
    K_PASS_TILE: tl.constexpr,
    PASS_FIRST: tl.constexpr,
    UNIT: tl.constexpr,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
):
    batch = (tl.program_id(0) // tokens).to(tl.int64)
    token = (tl.program_id(0) % tokens).to(tl.int64)
    group = tl.program_id(1)
    pair = tl.arange(0, HALF_TILE)[None, :]
    inside = pair < HALF
    cos_ptr += (batch * cos_batch_stride + token * cos_token_stride) * UNIT
    sin_ptr += (batch * sin_batch_stride + token * sin_token_stride) * UNIT
    cos_first = tl.load(cos_ptr + pair * COS_STRIDE, mask=inside, other=0.0).to(tl.float32)
    sin_first = tl.load(sin_ptr + pair * COS_STRIDE, mask=inside, other=0.0).to(tl.float32)
    if SHARED_COS:
        cos_second, sin_second = cos_first, sin_first
    else:
        cos_second = tl.load(cos_ptr + HALF + pair, mask=inside, other=0.0).to(tl.float32)
        sin_second = tl.load(sin_ptr + HALF + pair, mask=inside, other=0.0).to(tl.float32)
    for i in tl.static_range(2):
        # A constant, which is 0 without k.
        if (Q_HEADS, K_HEADS)[i] > 0:
            batch_stride, token_stride = (q_batch_stride, k_batch_stride)[i], (q_token_stride, k_token_stride)[i]
            out_batch_stride = (q_out_batch_stride, k_out_batch_stride)[i]
            out_token_stride = (q_out_token_stride, k_out_token_stride)[i]
            _rotate_heads(
                (q_ptr, k_ptr)[i] + (batch * batch_stride + token * token_stride) * UNIT,
                (q_out_ptr, k_out_ptr)[i] + (batch * out_batch_stride + token * out_token_stride) * UNIT,
                (q_head_stride, k_head_stride)[i],
                (q_out_head_stride, k_out_head_stride)[i],
                group * (Q_HEADS, K_HEADS)[i],
                (q_heads, k_heads)[i],
                (cos_first, cos_second, sin_first, sin_second),
                INVERSE,
                INTERLEAVED_IN,
                INTERLEAVED_OUT,
                HALF,
                HALF_TILE,
                (Q_PASS, K_PASS)[i],
                (Q_PASS_TILE, K_PASS_TILE)[i],
                PASS_FIRST,
                UNIT,
                (Q_HEADS, K_HEADS)[i],
            )


_launch = KernelLauncher(_rotary_kernel)


@dataclass(frozen=True)
class HeadTiling:
    """Programs per token, tile sizes and warps."""

    groups: int
    q_tile: int
    k_tile: int
    half: int
    half_tile: int
    warps: int


@functools.cache
def _plan(q_heads: int, k_heads: int, rotary: int, pass_first: int) -> HeadTiling:
    """`pass_first`: channels of queries that are copied before the others, 0 for copies behind them."""
    half = rotary // 2
    half_tile = triton.next_power_of_2(half)
    # Half of the channels of a head, as far as they are in one tile.
    groups = cdiv(max(q_heads, k_heads), max(1, _TILE // max(half_tile, triton.next_power_of_2(pass_first) // 2)))
    q_tile = triton.next_power_of_2(cdiv(q_heads, groups))
    k_tile = triton.next_power_of_2(cdiv(k_heads, groups)) if k_heads else 0
    lanes = q_tile * half_tile
    # Idle lanes reduce the bytes in flight: 16384 patches with 16 heads of 72 take 0.098 ms on an H200 with one warp,
    # 0.090 ms with two; 32 heads of 80 take 3% longer with two than with one, and 20% longer with four.
    warps = min(8, max(1, lanes // 1024)) if half == half_tile else min(2, max(1, lanes // 512))
    if pass_first:
        # The copy moves more bytes than the rotation.
        warps = min(8, max(1, q_tile * triton.next_power_of_2(pass_first) // 1024))
    return HeadTiling(groups, q_tile, k_tile, half, half_tile, warps)


@functools.lru_cache(maxsize=1024)
def _arguments(
    shape: tuple[int, ...],
    q_strides: tuple[tuple[int, ...], ...],
    k_heads: int,
    k_width: int,
    k_strides: tuple[tuple[int, ...], ...],
    cos_shape: tuple[int, ...],
    cos_strides: tuple[int, ...],
    sin_strides: tuple[int, ...],
    rotary: int,
    interleaved: tuple[bool, bool],
    last: bool,
    inverse: bool,
) -> tuple[tuple[int, int, int], tuple[int, ...], tuple[Any, ...], int]:
    """Grid, scalars, constants and warps of a launch.

    Args:
        shape: of q, [B, heads, S, D].
        rotary: channels of a head that are rotated.
        interleaved: whether input and output have GPT-J layout; else NeoX.
        last: the last channels are rotated, not the first.
        q_strides, k_strides: of input and output; `k_heads` is 0 without k.
    """
    batch, q_heads, tokens, width = shape
    plan = _plan(q_heads, k_heads, rotary, width - rotary if last else 0)
    strides = []
    for batch_stride, head_stride, token_stride, _ in (q_strides[0], k_strides[0], q_strides[1], k_strides[1]):
        strides += [batch_stride, token_stride, head_stride]
    for batch_stride, token_stride, _ in (cos_strides, sin_strides):
        strides += [batch_stride if cos_shape[0] > 1 else 0, token_stride]
    unit = math.gcd(16, *strides)
    copied = [tile for x in (width, k_width) for tile in (x - rotary, triton.next_power_of_2(max(x - rotary, 1)))]
    constants = (
        inverse,
        *interleaved,
        any(interleaved) or cos_shape[-1] != rotary,
        cos_strides[-1],
        plan.half,
        plan.half_tile,
        *copied,
        last,
        unit,
        plan.q_tile,
        plan.k_tile,
    )
    scalars = (*(stride // unit for stride in strides), tokens, q_heads, k_heads)
    return (batch * tokens, plan.groups, 1), scalars, constants, plan.warps


_NO_STRIDES: tuple[tuple[int, ...], ...] = ((0, 0, 0, 0), (0, 0, 0, 0))


def _empty_like(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Dense, with the dimension order of `x`; contiguous if that would not keep channels adjacent."""
    out = torch.empty_like(x, dtype=dtype)
    return out if out.stride(-1) == 1 else torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def _allocate(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, dtype: torch.dtype, *options: Any
) -> tuple[Tensor, Tensor | None]:
    return _empty_like(q, dtype), None if k is None else _empty_like(k, dtype)


def _rotate(
    outputs: tuple[Tensor, Tensor | None],
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    dtype: torch.dtype,
    rotary: int,
    interleaved_in: bool,
    interleaved_out: bool,
    last: bool,
    inverse: bool,
) -> None:
    """Rotate the first or last `rotary` channels of one or two tensors [B, heads, S, D]; results in `dtype`.

    `cos` and `sin` are [B or 1, S, rotary], or [B or 1, S, rotary / 2] with one element per pair.
    """
    q_out, k_out = outputs
    if q.numel() == 0:
        return
    q, k = _adjacent(q), None if k is None else _adjacent(k)
    interleaved = (interleaved_out, interleaved_in) if inverse else (interleaved_in, interleaved_out)
    if not cos.stride(-1) == sin.stride(-1) in (1, 2):
        cos, sin = cos.contiguous(), sin.contiguous()
    k_heads, k_width, k_strides = 0, rotary, _NO_STRIDES
    if k is not None and k_out is not None:
        k_heads, k_width, k_strides = k.shape[1], k.shape[3], (k.stride(), k_out.stride())
    grid, scalars, constants, warps = _arguments(
        q.shape,
        (q.stride(), q_out.stride()),
        k_heads,
        k_width,
        k_strides,
        cos.shape,
        cos.stride(),
        sin.stride(),
        rotary,
        interleaved,
        last,
        inverse,
    )
    _launch(grid, (q, k, cos, sin, q_out, k_out), (), scalars, constants, warps)


_rotary = custom_op(
    "rotary_pos_emb(Tensor q, Tensor? k, Tensor cos, Tensor sin, ScalarType dtype, int rotary, bool interleaved_in,"
    " bool interleaved_out, bool last, bool inverse) -> (Tensor, Tensor)",
    launched(_allocate, _rotate),
    _allocate,
)


def _adjacent(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


class _Rotary(torch.autograd.Function):
    """Not a `differentiable_op`: backward is the same op with the inverse rotation and does not need q and k."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        rotary: int,
        interleaved_in: bool,
        interleaved_out: bool,
        last: bool,
        keep_dtype: bool,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.save_for_backward(cos, sin)
        ctx.set_materialize_grads(False)
        ctx.form, ctx.dtype = (rotary, interleaved_in, interleaved_out, last), q.dtype
        dtype = q.dtype if keep_dtype or q.dtype == cos.dtype else torch.promote_types(q.dtype, cos.dtype)
        return _rotary(q, k, cos, sin, dtype, *ctx.form, False)

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


def _check(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, same_width: bool = True) -> None:
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
            reject(_LABEL, name, unsupported_dtype(x.dtype), "use eager")
        if x.ndim != (4 if name in "qkx" else 3):
            reject(_LABEL, name, f"its shape is {tuple(x.shape)}", "use eager, or the layout of the op's contract")
    if q.dtype != k.dtype:
        reject(_LABEL, "k", f"its dtype is {k.dtype} beside q's {q.dtype}", "use eager")
    batch, _, tokens, width = q.shape
    if (k.shape[0], k.shape[2]) != (batch, tokens) or (same_width and k.shape[3] != width):
        reject(_LABEL, "k", f"its shape is {tuple(k.shape)} beside q's {tuple(q.shape)}", "use eager")
    name, x = ("cos", cos) if cos.requires_grad else ("sin", sin)
    if x.requires_grad:
        reject(_LABEL, name, "it requires a gradient, and only q and k receive one", "use eager")
    name, x = ("sin", sin) if sin.shape != cos.shape else ("cos", cos)
    reject(_LABEL, name, f"its shape is {tuple(x.shape)} for {first}'s {tuple(q.shape)}", "use eager")


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
    if unsqueeze_dim not in (1, 2):
        reject(_LABEL, "unsqueeze_dim", f"it is {unsqueeze_dim}, not 1 or 2", "use eager")
    swap = unsqueeze_dim == 2
    if swap:
        q, k = q.transpose(1, 2), None if k is None else k.transpose(1, 2)
    _check(q, q if k is None else k, cos, sin, same_width=not last)
    rotary, width = cos.shape[-1] * (2 if half_cos_sin else 1), q.shape[-1]
    if last and k is not None:
        width = min(width, k.shape[-1])
    if rotary % 2 or rotary > width or (rotary != width and not (partial or last)):
        found = f"it has {cos.shape[-1]} channels for heads of {width}"
        reject(_LABEL, "cos", found, "use eager, or the partial variant")
    q, k = _Rotary.apply(q, k, cos, sin, rotary, *interleaved, last, keep_dtype)
    return (q.transpose(1, 2), None if k is None else k.transpose(1, 2)) if swap else (q, k)


_GPTJ = (True, True)


def full(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """`op.full` for float32, bfloat16 and float16, computed in fp32."""
    return _apply(q, k, cos, sin, unsqueeze_dim)


def full_fp32(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """`op.full_fp32`, within the limits of `full`."""
    return _apply(q, k, cos, sin, unsqueeze_dim, keep_dtype=True)


def single(x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Tensor:
    """`op.single`, within the limits of `full`."""
    return _apply(x, None, cos, sin, unsqueeze_dim)[0]


def half_cos_sin(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """`op.half_cos_sin`, within the limits of `full`."""
    return _apply(q, k, cos, sin, unsqueeze_dim, half_cos_sin=True)


def partial(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """`op.partial`, within the limits of `full`."""
    return _apply(q, k, cos, sin, unsqueeze_dim, partial=True)


def gptj_to_neox(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """`op.gptj_to_neox`, within the limits of `full`."""
    return _apply(q, k, cos, sin, unsqueeze_dim, interleaved=(True, False))


def partial_last(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """`op.partial_last`, within the limits of `full`; `k` may have fewer channels than `q`."""
    return _apply(q, k, cos, sin, unsqueeze_dim, last=True)


def gptj_to_neox_last(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """`op.gptj_to_neox_last`, within the limits of `partial_last`."""
    return _apply(q, k, cos, sin, unsqueeze_dim, interleaved=(True, False), last=True)


def gptj(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """`op.gptj`, within the limits of `full`."""
    return _apply(q, k, cos, sin, unsqueeze_dim, interleaved=_GPTJ, half_cos_sin=True, partial=True)


def gptj_fp32(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """`op.gptj_fp32`, within the limits of `full`."""
    return _apply(q, k, cos, sin, unsqueeze_dim, interleaved=_GPTJ, half_cos_sin=True, partial=True, keep_dtype=True)


def gptj_fp32_last(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """`op.gptj_fp32_last`, within the limits of `partial_last`."""
    return _apply(q, k, cos, sin, unsqueeze_dim, interleaved=_GPTJ, half_cos_sin=True, last=True, keep_dtype=True)


def multimodal(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, mrope_section: Sequence[int], unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """`op.multimodal`: `cos` and `sin` are merged by torch; then as `full`."""
    return full(q, k, merge_sections(cos, mrope_section), merge_sections(sin, mrope_section), unsqueeze_dim)


def vision(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """`op.vision` for float32, bfloat16 and float16, computed in fp32."""
    batched = [x.transpose(0, 1).unsqueeze(0) for x in (q, k)]
    cos_sin = [x.unsqueeze(0) for x in (cos, sin)]
    _check(batched[0], batched[1], cos_sin[0], cos_sin[1])
    if cos.shape[-1] != q.shape[-1]:
        reject(_LABEL, "cos", f"it has {cos.shape[-1]} channels for heads of {q.shape[-1]}", "use eager")
    q_out, k_out = _Rotary.apply(*batched, *cos_sin, q.shape[-1], False, False, False, True)
    return q_out.squeeze(0).transpose(0, 1), k_out.squeeze(0).transpose(0, 1)
