"""RMSNorm of the heads of queries and keys with their rotation, in Triton: each is read once and written once.

A program has all heads of one token, or of several tokens one after another in backward, so cos and sin are loaded
once. Backward computes the statistics of a head again from the input, which it loads anyway. The gradients of the
weights are summed per program in registers, then over programs by a second kernel in a fixed order: no atomics,
bitwise deterministic. Strides are passed as in `rotate.py`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from opslot._base.kernel_launch import KernelLauncher, cdiv, sm_count
from opslot.ops._common.arguments import adjacent, zero
from opslot.ops._common.row_tiles import sum_partials
from opslot.ops.rotary_pos_emb.kernels.norm_heads import (
    backward_heads,
    forward_halves,
    forward_whole,
    load_angles,
    load_weight,
    store_partial,
)
from opslot.ops.rotary_pos_emb.kernels.rotate import stride_names, strides_in_units, with_equal_strides


@triton.jit(do_not_specialize=[*stride_names("q", "k", "q_out", "k_out"), "tokens", "q_heads", "k_heads"])
def _forward_kernel(
    q_ptr,
    k_ptr,
    q_weight_ptr,
    k_weight_ptr,
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
    q_eps,
    k_eps,
    OFFSET: tl.constexpr,
    CAST_LAST: tl.constexpr,
    NORM_LAST: tl.constexpr,
    KEEPS_DTYPE: tl.constexpr,
    COS_STRIDE: tl.constexpr,
    HALF: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    UNIT: tl.constexpr,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
):
    batch = (tl.program_id(0) // tokens).to(tl.int64)
    token = (tl.program_id(0) % tokens).to(tl.int64)
    cos_ptr += (batch * cos_batch_stride + token * cos_token_stride) * UNIT
    sin_ptr += (batch * sin_batch_stride + token * sin_token_stride) * UNIT
    angles = load_angles(cos_ptr, sin_ptr, False, COS_STRIDE, HALF, WIDTH, TILE)
    for i in tl.static_range(2):
        head = tl.program_id(1) * (Q_HEADS, K_HEADS)[i] + tl.arange(0, (Q_HEADS, K_HEADS)[i])[:, None].to(tl.int64)
        inside = head < (q_heads, k_heads)[i]
        x = batch * (q_batch_stride, k_batch_stride)[i] + token * (q_token_stride, k_token_stride)[i]
        out = batch * (q_out_batch_stride, k_out_batch_stride)[i] + token * (q_out_token_stride, k_out_token_stride)[i]
        x_ptr = (q_ptr, k_ptr)[i] + x * UNIT + head * (q_head_stride, k_head_stride)[i] * UNIT
        out_ptr = (q_out_ptr, k_out_ptr)[i] + out * UNIT + head * (q_out_head_stride, k_out_head_stride)[i] * UNIT
        weight = load_weight((q_weight_ptr, k_weight_ptr)[i], OFFSET, HALF, WIDTH, TILE)
        if WIDTH == 2 * HALF:
            forward_halves(
                x_ptr,
                out_ptr,
                weight,
                angles,
                inside,
                (q_eps, k_eps)[i],
                (q_weight_ptr, k_weight_ptr)[i].dtype.element_ty,
                CAST_LAST,
                NORM_LAST,
                KEEPS_DTYPE,
                HALF,
                TILE,
            )
        else:
            forward_whole(
                x_ptr,
                out_ptr,
                weight,
                angles,
                inside,
                (q_eps, k_eps)[i],
                (q_weight_ptr, k_weight_ptr)[i].dtype.element_ty,
                CAST_LAST,
                HALF,
                WIDTH,
                TILE,
            )


@triton.jit(
    do_not_specialize=[
        *stride_names("q", "k", "dq_out", "dk_out", "dq", "dk"),
        "batches",
        "tokens",
        "q_heads",
        "k_heads",
    ]
)
def _backward_kernel(
    dq_out_ptr,
    dk_out_ptr,
    q_ptr,
    k_ptr,
    q_weight_ptr,
    k_weight_ptr,
    cos_ptr,
    sin_ptr,
    dq_ptr,
    dk_ptr,
    partial_ptr,
    q_batch_stride,
    q_token_stride,
    q_head_stride,
    k_batch_stride,
    k_token_stride,
    k_head_stride,
    dq_out_batch_stride,
    dq_out_token_stride,
    dq_out_head_stride,
    dk_out_batch_stride,
    dk_out_token_stride,
    dk_out_head_stride,
    dq_batch_stride,
    dq_token_stride,
    dq_head_stride,
    dk_batch_stride,
    dk_token_stride,
    dk_head_stride,
    cos_batch_stride,
    cos_token_stride,
    sin_batch_stride,
    sin_token_stride,
    batches,
    tokens,
    q_heads,
    k_heads,
    q_eps,
    k_eps,
    OFFSET: tl.constexpr,
    NORM_LAST: tl.constexpr,
    KEEPS_DTYPE: tl.constexpr,
    COS_STRIDE: tl.constexpr,
    HALF: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    UNIT: tl.constexpr,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    NEED_X: tl.constexpr,
    NEED_WEIGHT: tl.constexpr,
    STAGES: tl.constexpr,
):
    q_weight = load_weight(q_weight_ptr, OFFSET, HALF, WIDTH, TILE)
    k_weight = load_weight(k_weight_ptr, OFFSET, HALF, WIDTH, TILE)
    q_first = tl.zeros((Q_HEADS, TILE), dtype=tl.float32)
    q_second = tl.zeros((Q_HEADS, TILE), dtype=tl.float32)
    k_first = tl.zeros((K_HEADS, TILE), dtype=tl.float32)
    k_second = tl.zeros((K_HEADS, TILE), dtype=tl.float32)
    q_strides = q_batch_stride, q_token_stride, q_head_stride
    k_strides = k_batch_stride, k_token_stride, k_head_stride
    dq_out_strides = dq_out_batch_stride, dq_out_token_stride, dq_out_head_stride
    dk_out_strides = dk_out_batch_stride, dk_out_token_stride, dk_out_head_stride
    dq_strides = dq_batch_stride, dq_token_stride, dq_head_stride
    dk_strides = dk_batch_stride, dk_token_stride, dk_head_stride
    for index in tl.range(tl.program_id(0), batches * tokens, tl.num_programs(0), num_stages=STAGES):
        batch = (index // tokens).to(tl.int64)
        token = (index % tokens).to(tl.int64)
        angles = load_angles(
            cos_ptr + (batch * cos_batch_stride + token * cos_token_stride) * UNIT,
            sin_ptr + (batch * sin_batch_stride + token * sin_token_stride) * UNIT,
            not NORM_LAST,
            COS_STRIDE,
            HALF,
            WIDTH,
            TILE,
        )
        for i in tl.static_range(2):
            first, second = backward_heads(
                (dq_out_ptr, dk_out_ptr)[i],
                (q_ptr, k_ptr)[i],
                (dq_ptr, dk_ptr)[i],
                (q_weight, k_weight)[i],
                angles,
                batch,
                token,
                (dq_out_strides, dk_out_strides)[i],
                (q_strides, k_strides)[i],
                (dq_strides, dk_strides)[i],
                (q_heads, k_heads)[i],
                (q_eps, k_eps)[i],
                NORM_LAST,
                KEEPS_DTYPE,
                NEED_X,
                HALF,
                WIDTH,
                TILE,
                UNIT,
                (Q_HEADS, K_HEADS)[i],
            )
            if NEED_WEIGHT:
                if i == 0:
                    q_first += first
                else:
                    k_first += first
                if WIDTH == 2 * HALF:
                    if i == 0:
                        q_second += second
                    else:
                        k_second += second
    if NEED_WEIGHT:
        count = tl.num_programs(0) * tl.num_programs(1)
        row = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)
        store_partial(partial_ptr + row * WIDTH, q_first, q_second, HALF, WIDTH, TILE)
        store_partial(partial_ptr + (count + row) * WIDTH, k_first, k_second, HALF, WIDTH, TILE)


_launch_forward = KernelLauncher(_forward_kernel)
_launch_backward = KernelLauncher(_backward_kernel)


@dataclass(frozen=True)
class NormRotationTiling:
    """Programs per token, and for a persistent grid CTAs per SM and tokens loaded ahead."""

    groups: int
    warps: int
    programs: int = 0
    stages: int = 1


def forward_tiling(q_heads: int, k_heads: int, width: int) -> NormRotationTiling:
    """Forward: tiles of at most 8192 elements, 32 or more elements a thread."""
    elements = triton.next_power_of_2(max(q_heads, k_heads)) * triton.next_power_of_2(width)
    groups = max(1, elements // 8192)
    return NormRotationTiling(groups, warps=min(8, max(1, elements // groups // 1024)))


def backward_tiling(q_heads: int, width: int, rotary: int, element_bytes: int) -> NormRotationTiling:
    """Backward: tiles of at most 8 KiB, and two programs per token from 2048 elements.

    Of 14 to 40 tilings, the fastest or within 5 % of it for 8192 tokens in bf16 on an H200, with q and k heads of
    16 and 8, 32 and 8, 64 and 4 of 128, 8 and 4 of 256, all rotated, and of 32 and 8, 96 and 8 of 128, 16 and 2 of 256,
    rotated in part.
    """
    elements = q_heads * width
    groups = max(cdiv(elements * element_bytes, 8192), 1 if elements <= 2048 else 2)
    programs = 4 if groups == 1 else 2
    if width != rotary:
        return NormRotationTiling(groups, warps=4, programs=programs)
    if width >= 256:
        return NormRotationTiling(groups, warps=2, programs=2 * programs)
    return NormRotationTiling(groups, warps=4 if elements > 1024 else 2, programs=programs, stages=3)


@functools.lru_cache(maxsize=1024)
def _arguments(
    backward: bool,
    shape: tuple[int, ...],
    element_bytes: int,
    k_heads: int,
    cos_shape: tuple[int, ...],
    cos_strides: tuple[int, ...],
    sin_strides: tuple[int, ...],
    eps: tuple[float, float],
    *strides: tuple[int, ...],
) -> tuple[NormRotationTiling, tuple[float, ...], tuple[int, ...]]:
    """Tiling, scalars, and the constants of the layout.

    Args:
        shape: of q, [B, heads, S, D].
        strides: of tensors [B, heads, S, D], in the order of the kernel's.
    """
    batches, q_heads, tokens, width = shape
    tiling = (
        backward_tiling(q_heads, width, cos_shape[-1], element_bytes)
        if backward
        else forward_tiling(q_heads, k_heads, width)
    )
    unit, scalars = strides_in_units(strides, (cos_strides, sin_strides), cos_shape[0])
    half = cos_shape[-1] // 2
    constants = (
        cos_strides[-1],
        half,
        width,
        triton.next_power_of_2(half if width == 2 * half else width),
        unit,
        *(triton.next_power_of_2(cdiv(heads, tiling.groups)) for heads in (q_heads, k_heads)),
    )
    sizes = (*([batches] if backward else []), tokens, q_heads, k_heads)
    return tiling, (*scalars, *sizes, *eps), constants


def _arguments_of(
    backward: bool, given: NormRotation, *others: Tensor
) -> tuple[NormRotationTiling, tuple[float, ...], tuple[int, ...]]:
    q, k, _, _, cos, sin, *eps = given[:8]
    strides = [x.stride() for x in (q, k, *others)]
    return _arguments(
        backward, q.shape, q.element_size(), k.shape[1], cos.shape, cos.stride(), sin.stride(), tuple(eps), *strides
    )


class NormRotation(NamedTuple):
    """The arguments of the op: q and k [B, heads, S, D]; cos and sin [B or 1, S, R], of the first R channels."""

    q: Tensor
    k: Tensor
    q_weight: Tensor
    k_weight: Tensor
    cos: Tensor
    sin: Tensor
    q_eps: float
    k_eps: float
    weight_offset: bool
    cast_after_weight: bool
    norm_last: bool
    keep_dtype: bool

    def adjacent(self) -> NormRotation:
        """With adjacent channels, and equal strides of `cos` and `sin`."""
        arguments: list[Any] = [*map(adjacent, self[:4]), *with_equal_strides(self.cos, self.sin), *self[6:]]
        return NormRotation(*arguments)

    @property
    def keeps(self) -> bool:
        """Whether the rotation keeps the dtype."""
        return self.keep_dtype or self.cos.dtype == self.q.dtype


def launch_forward(outputs: tuple[Tensor, Tensor], *arguments: Any) -> None:
    """Normalize and rotate, given a `NormRotation`."""
    given = NormRotation(*arguments)
    if given.q.numel() == 0:
        return
    given = given.adjacent()
    shape = given.q.shape
    tiling, scalars, constants = _arguments_of(False, given, *outputs)
    _launch_forward(
        (shape[0] * shape[2], tiling.groups, 1),
        (*given[:6], *outputs),
        (),
        scalars,
        (*given[8:11], given.keeps, *constants),
        tiling.warps,
    )


def launch_backward(
    gradients: tuple[Tensor | None, ...],
    dq_out: Tensor | None,
    dk_out: Tensor | None,
    *arguments: Any,
) -> None:
    """Write the gradients of q and k, of both weights, or of all four."""
    given = NormRotation(*arguments[:-4])
    dq, dk, dq_weight, dk_weight = gradients
    if given.q.numel() == 0:
        zero(dq_weight, dk_weight)
        return
    dq_out = torch.zeros_like(given.q) if dq_out is None else adjacent(dq_out)
    dk_out = torch.zeros_like(given.k) if dk_out is None else adjacent(dk_out)
    given = given.adjacent()
    q, k = given[:2]
    shape = q.shape
    written = (q if dq is None else dq, k if dk is None else dk)
    tiling, scalars, constants = _arguments_of(True, given, dq_out, dk_out, *written)
    programs = min(shape[0] * shape[2], sm_count(q.device) * tiling.programs)
    partial = None
    if dq_weight is not None:
        partial = q.new_empty((2, programs * tiling.groups, shape[3]), dtype=torch.float32)
    _launch_backward(
        (programs, tiling.groups, 1),
        (dq_out, dk_out, *given[:6], dq, dk, partial),
        (),
        scalars,
        (
            given.weight_offset,
            given.norm_last,
            given.keeps,
            *constants,
            dq is not None,
            partial is not None,
            tiling.stages,
        ),
        tiling.warps,
    )
    if partial is not None and dq_weight is not None and dk_weight is not None:
        sum_partials(partial, dq_weight, dk_weight)
