"""Keys and values of multi-head latent attention in Triton: each channel is read once and written once.

Forward writes the keys; values stay a view. Backward writes the gradient of `kv` from those of keys and values, and
adds that of the shared part over the heads, in fp32 and in a fixed order.

Strides are passed in units of UNIT elements, a constexpr that divides all of them. Otherwise strides that are not
multiples of 16 would cause 2-byte instead of 16-byte loads.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from opslot._base.kernel_launch import KernelLauncher, cdiv
from opslot.ops._common.arguments import adjacent, reject, require_floats
from opslot.ops._common.custom_op import launch_op, once_differentiable

_LABEL = "expand_kv_implementation='triton'"
# Most elements of a tile, heads times channels.
_TILE = 4096


@triton.jit(
    do_not_specialize=[
        *("kv_batch_stride", "kv_token_stride", "kv_head_stride", "rot_batch_stride", "rot_token_stride"),
        *("tokens", "heads"),
    ]
)
def _expand_kernel(
    kv_ptr,
    rot_ptr,
    key_ptr,
    kv_batch_stride,
    kv_token_stride,
    kv_head_stride,
    rot_batch_stride,
    rot_token_stride,
    tokens,
    heads,
    NOPE: tl.constexpr,
    NOPE_TILE: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_TILE: tl.constexpr,
    UNIT: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Keys [B, S, heads, NOPE + ROPE] of HEADS heads of one token."""
    row = tl.program_id(0).to(tl.int64)
    batch, token = row // tokens, row % tokens
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None].to(tl.int64)
    channel, rotated = tl.arange(0, NOPE_TILE)[None, :], tl.arange(0, ROPE_TILE)[None, :]
    inside = head < heads
    kv_ptr += (batch * kv_batch_stride + token * kv_token_stride + head * kv_head_stride) * UNIT
    rot_ptr += (batch * rot_batch_stride + token * rot_token_stride) * UNIT
    key_ptr += (row * heads + head) * (NOPE + ROPE)
    dtype: tl.constexpr = key_ptr.dtype.element_ty
    nope = tl.load(kv_ptr + channel, mask=inside & (channel < NOPE), other=0.0)
    # Loaded once for each head, from the L1 cache, so that no thread waits for another one.
    rope = tl.load(rot_ptr + 0 * head + rotated, mask=inside & (rotated < ROPE), other=0.0)
    tl.store(key_ptr + channel, nope.to(dtype), mask=inside & (channel < NOPE))
    tl.store(key_ptr + NOPE + rotated, rope.to(dtype), mask=inside & (rotated < ROPE))


@triton.jit(
    do_not_specialize=[
        *("dkey_batch_stride", "dkey_token_stride", "dkey_head_stride"),
        *("dvalue_batch_stride", "dvalue_token_stride", "dvalue_head_stride"),
        *("tokens", "heads"),
    ]
)
def _gradient_kernel(
    dkey_ptr,
    dvalue_ptr,
    dkv_ptr,
    drot_ptr,
    dkey_batch_stride,
    dkey_token_stride,
    dkey_head_stride,
    dvalue_batch_stride,
    dvalue_token_stride,
    dvalue_head_stride,
    tokens,
    heads,
    NOPE: tl.constexpr,
    NOPE_TILE: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_TILE: tl.constexpr,
    V: tl.constexpr,
    V_TILE: tl.constexpr,
    UNIT: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Gradients of kv [B, S, heads, NOPE + V] and of the shared part [B, S, ROPE] for one token."""
    row = tl.program_id(0).to(tl.int64)
    batch, token = row // tokens, row % tokens
    dkey_ptr += (batch * dkey_batch_stride + token * dkey_token_stride) * UNIT
    dvalue_ptr += (batch * dvalue_batch_stride + token * dvalue_token_stride) * UNIT
    dkv_ptr += row * heads * (NOPE + V)
    channel, v = tl.arange(0, NOPE_TILE)[None, :], tl.arange(0, V_TILE)[None, :]
    rotated = tl.arange(0, ROPE_TILE)
    dtype: tl.constexpr = dkv_ptr.dtype.element_ty
    total = tl.zeros((ROPE_TILE,), tl.float32)
    for first in range(0, heads, HEADS):
        head = first + tl.arange(0, HEADS)[:, None].to(tl.int64)
        inside = head < heads
        dkey, dkv = dkey_ptr + head * dkey_head_stride * UNIT, dkv_ptr + head * (NOPE + V)
        dvalue = dvalue_ptr + head * dvalue_head_stride * UNIT
        rope = tl.load(dkey + NOPE + rotated[None, :], mask=inside & (rotated < ROPE)[None, :], other=0.0)
        nope = tl.load(dkey + channel, mask=inside & (channel < NOPE), other=0.0)
        value = tl.load(dvalue + v, mask=inside & (v < V), other=0.0)
        tl.store(dkv + channel, nope.to(dtype), mask=inside & (channel < NOPE))
        tl.store(dkv + NOPE + v, value.to(dtype), mask=inside & (v < V))
        total += tl.sum(rope.to(tl.float32), 0)
    tl.store(drot_ptr + row * ROPE + rotated, total.to(drot_ptr.dtype.element_ty), mask=rotated < ROPE)


_launch = KernelLauncher(_expand_kernel)
_launch_gradient = KernelLauncher(_gradient_kernel)


@functools.lru_cache(maxsize=1024)
def _plan(heads: int, *widths: int) -> tuple[list[int], int, int]:
    """Tiles of each width, heads of a tile, and warps."""
    tiles = [triton.next_power_of_2(width) for width in widths]
    per_tile = min(triton.next_power_of_2(heads), max(1, _TILE // max(tiles)))
    # A thread moves 32 elements or more, 16 bytes at a time.
    return tiles, per_tile, min(8, max(1, per_tile * max(tiles) // 1024))


def _in_units(*strides: int) -> tuple[int, list[int]]:
    unit = math.gcd(16, *strides)
    return unit, [stride // unit for stride in strides]


def _allocate(kv: Tensor, k_rot: Tensor, nope: int) -> Tensor:
    batch, heads, tokens, _ = kv.shape
    dtype = torch.promote_types(kv.dtype, k_rot.dtype)
    return kv.new_empty(batch, tokens, heads, nope + k_rot.shape[-1], dtype=dtype).transpose(1, 2)


def _expand(key: Tensor, kv: Tensor, k_rot: Tensor, nope: int) -> None:
    if key.numel() == 0:
        return
    batch, heads, tokens, _ = kv.shape
    kv, k_rot = adjacent(kv), adjacent(k_rot)
    rope = k_rot.shape[-1]
    (nope_tile, rope_tile), per_tile, warps = _plan(heads, nope, rope)
    kv_batch, kv_head, kv_token, _ = kv.stride()
    unit, strides = _in_units(kv_batch, kv_token, kv_head, k_rot.stride(0), k_rot.stride(2))
    constants = (nope, nope_tile, rope, rope_tile, unit, per_tile)
    grid = (batch * tokens, cdiv(heads, per_tile), 1)
    _launch(grid, (kv, k_rot, key), (), (*strides, tokens, heads), constants, warps)


_expand_op = launch_op("expand_kv(Tensor kv, Tensor k_rot, int nope) -> Tensor", _allocate, _expand)


def _allocate_gradients(
    dkey: Tensor, dvalue: Tensor, nope: int, kv_dtype: torch.dtype, k_rot_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    batch, heads, tokens, v = dvalue.shape
    dkv = dvalue.new_empty(batch, tokens, heads, nope + v, dtype=kv_dtype).transpose(1, 2)
    return dkv, dkey.new_empty(batch, 1, tokens, dkey.shape[-1] - nope, dtype=k_rot_dtype)


def _gradients(gradients: tuple[Tensor, Tensor], dkey: Tensor, dvalue: Tensor, nope: int, *dtypes: torch.dtype) -> None:
    dkv, drot = gradients
    batch, heads, tokens, v = dvalue.shape
    if dkey.numel() == 0:
        return
    dkey, dvalue = adjacent(dkey), adjacent(dvalue)
    rope = drot.shape[-1]
    (nope_tile, rope_tile, v_tile), per_tile, warps = _plan(heads, nope, rope, v)
    strides = [x.stride(dim) for x in (dkey, dvalue) for dim in (0, 2, 1)]
    unit, strides = _in_units(*strides)
    constants = (nope, nope_tile, rope, rope_tile, v, v_tile, unit, per_tile)
    grid = (batch * tokens, 1, 1)
    _launch_gradient(grid, (dkey, dvalue, dkv, drot), (), (*strides, tokens, heads), constants, warps)


_gradient_op = launch_op(
    "expand_kv_backward(Tensor dkey, Tensor dvalue, int nope, ScalarType kv_dtype, ScalarType k_rot_dtype)"
    " -> (Tensor, Tensor)",
    _allocate_gradients,
    _gradients,
)


class _ExpandKv(torch.autograd.Function):
    """Not a `differentiable_op`: values are a view of `kv`, and backward needs neither input."""

    @staticmethod
    def forward(ctx: Any, kv: Tensor, k_rot: Tensor, nope: int) -> tuple[Tensor, Tensor]:
        ctx.nope, ctx.dtypes = nope, (kv.dtype, k_rot.dtype)
        return _expand_op(kv, k_rot, nope), kv[..., nope:]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dkey: Tensor, dvalue: Tensor) -> tuple[Tensor, Tensor, None]:
        return *_gradient_op(dkey, dvalue, ctx.nope, *ctx.dtypes), None


def standard(kv: Tensor, k_rot: Tensor, qk_nope_head_dim: int) -> tuple[Tensor, Tensor]:
    """`op.standard` for float32, bfloat16 and float16."""
    require_floats(_LABEL, kv=kv, k_rot=k_rot)
    if kv.dim() != 4 or not 0 < qk_nope_head_dim < kv.shape[-1]:
        found = f"its shape is {tuple(kv.shape)}, not [B, heads, S, {qk_nope_head_dim} + v]"
        reject(_LABEL, "kv", found, "use eager")
    if k_rot.dim() != 4 or k_rot.shape[:-1] != (kv.shape[0], 1, kv.shape[2]):
        reject(_LABEL, "k_rot", f"its shape is {tuple(k_rot.shape)} beside kv's {tuple(kv.shape)}", "use eager")
    if not k_rot.shape[-1]:
        # Layers without rotary positions (Mistral Large 4) have no part that their heads share.
        key, value = kv.split((qk_nope_head_dim, kv.shape[-1] - qk_nope_head_dim), dim=-1)
        return key.to(torch.promote_types(kv.dtype, k_rot.dtype)), value
    return _ExpandKv.apply(kv, k_rot, qk_nope_head_dim)
