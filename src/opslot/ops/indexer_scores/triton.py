"""Scores of an indexer in Triton: a tile of queries and keys sums over the index heads in registers.

Products of heads are never in memory. Tiles without a visible key are filled without computing them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from opslot._base.jit import dot
from opslot._base.kernel_launch import KernelLauncher, cdiv, compute_capability
from opslot.ops._common.arguments import adjacent, in_autocast_dtype, in_one_dtype, reject, require_floats
from opslot.ops._common.custom_op import launch_op
from opslot.ops._common.specs import H200

KERNEL = "indexer_scores_implementation='triton'"
_WIDEST = 256


def standard(query: Tensor, key: Tensor, weights: Tensor, scale: float = 1.0, visible: Tensor | None = None) -> Tensor:
    """`op.standard`, in autocast's dtype where autocast is on.

    Raises:
        KernelError: unsupported shapes, dtypes or devices.
    """
    require_floats(KERNEL, query=query, key=key, weights=weights)
    batch, length, heads, _ = query.shape
    require_heads(query, key)
    if weights.shape != (batch, length, heads):
        found = f"its shape is {tuple(weights.shape)} beside query's {tuple(query.shape)}"
        reject(KERNEL, "weights", found, "pass one weight per query and head")
    if visible is not None and (visible.shape[0] != 2 or visible.shape[2] != length or visible.is_floating_point()):
        found = f"it is {visible.dtype} {tuple(visible.shape)} for {length} queries"
        reject(KERNEL, "visible", found, "pass int32 [2, B or 1, S]")
    if scale <= 0:
        reject(KERNEL, "scale", f"it is {scale}", "pass a positive factor")
    with torch.no_grad():
        return _scores(*in_one_dtype(*in_autocast_dtype(query, key)), weights, visible, scale)


def require_heads(query: Tensor, key: Tensor) -> None:
    """Raise KernelError unless queries are [B, S, H, D] and keys one head [B, T, D] of a supported size."""
    batch, _, _, width = query.shape
    if width > _WIDEST:
        reject(KERNEL, "query", f"its head size is {width}, supported are sizes up to {_WIDEST}", "use eager")
    if key.dim() != 3 or key.shape[0] != batch or key.shape[2] != width:
        found = f"its shape is {tuple(key.shape)} beside query's {tuple(query.shape)}"
        reject(KERNEL, "key", found, "pass one head of keys [B, T, D]")


@dataclass(frozen=True)
class ScoresTile:
    queries: int
    keys: int
    warps: int
    stages: int


# These fit into 99 KiB of shared memory, that of the smallest supported GPUs.
_HALF, _WIDE = ScoresTile(64, 128, 4, 2), ScoresTile(32, 64, 4, 1)
# Queries of a head are read again for each tile of keys, so that few keys are bound by the L2 cache.
_H200_HALF = ScoresTile(64, 256, 8, 3)


def tile(element_bytes: int, columns: int, capability: tuple[int, int] | None) -> ScoresTile:
    if element_bytes > 2 or columns > 128:
        return _WIDE
    return _H200_HALF if capability == H200 else _HALF


@triton.jit
def load_tile(ptr, index, stride, valid, WIDTH: tl.constexpr, D: tl.constexpr):
    """[len(index), D]: `WIDTH` channels of the tokens or keys `index`, and zeros."""
    column = tl.arange(0, D)
    mask = valid[:, None] & (column < WIDTH)[None, :]
    return tl.load(ptr + index.to(tl.int64)[:, None] * stride + column[None, :], mask=mask, other=0.0)


@triton.jit
def seen_keys(key, start, end):
    """[queries, keys]: whether a query, which sees the keys from `start` to `end`, sees `key`."""
    return (key[None, :] >= start[:, None]) & (key[None, :] < end[:, None])


@triton.jit(do_not_specialize=["queries", "keys", "heads"])
def _scores_kernel(
    q_ptr,
    k_ptr,
    weights_ptr,
    visible_ptr,
    out_ptr,
    q_batch_stride,
    q_token_stride,
    q_head_stride,
    k_batch_stride,
    k_token_stride,
    weights_batch_stride,
    weights_token_stride,
    weights_head_stride,
    visible_stride,
    visible_size,
    queries,
    keys,
    heads,
    scale,
    LIMITED: tl.constexpr,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    b = tl.program_id(1).to(tl.int64)
    key_blocks = tl.cdiv(keys, BLOCK_N)
    token = tl.program_id(0) // key_blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    key = tl.program_id(0) % key_blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    valid, inside = token < queries, key < keys
    # Known to be multiples of UNIT, which loads of 16 bytes require.
    q_token_stride = q_token_stride // UNIT * UNIT
    q_head_stride = q_head_stride // UNIT * UNIT
    k_token_stride = k_token_stride // UNIT * UNIT

    if LIMITED:
        visible_ptr += b * visible_stride + token
        start = tl.load(visible_ptr, mask=valid, other=0)
        end = tl.load(visible_ptr + visible_size, mask=valid, other=0)
        seen = seen_keys(key, start, end)
        heads = tl.where(tl.max(tl.max(seen.to(tl.int32), 1), 0) > 0, heads, 0)
    k_ptr += b * (k_batch_stride // UNIT * UNIT)
    k = load_tile(k_ptr, key, k_token_stride, inside, WIDTH, D)
    q_ptr += b * (q_batch_stride // UNIT * UNIT)
    column = tl.arange(0, D)
    q_pointers = q_ptr + token.to(tl.int64)[:, None] * q_token_stride + column[None, :]
    q_mask = valid[:, None] & (column < WIDTH)[None, :]
    weights_ptr += b * weights_batch_stride + token.to(tl.int64) * weights_token_stride
    scores = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for head in tl.range(0, heads, num_stages=STAGES):
        q = tl.load(q_pointers + head * q_head_stride, mask=q_mask, other=0.0)
        weight = tl.load(weights_ptr + head * weights_head_stride, mask=valid, other=0.0).to(tl.float32)
        head_scores = dot(q, tl.trans(k), tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32))
        scores += tl.maximum(head_scores, 0.0) * weight[:, None]
    scores *= scale
    if LIMITED:
        scores = tl.where(seen, scores, float("-inf"))
    out_ptr += b * queries * keys + token.to(tl.int64)[:, None] * keys + key[None, :]
    tl.store(out_ptr, scores, mask=valid[:, None] & inside[None, :])


_launch = KernelLauncher(_scores_kernel)


def layout(query: Tensor, key: Tensor) -> tuple[tuple[int, ...], int, int]:
    """The strides of queries and keys, the number that divides them, and the columns of their tiles."""
    strides = (*query.stride()[:3], *key.stride()[:2])
    unit = 8 if all(stride % 8 == 0 for stride in strides) else 1
    return strides, unit, max(16, triton.next_power_of_2(query.shape[-1]))


def bounds_strides(bounds: Tensor) -> tuple[int, int]:
    """Of [2, B or 1, S]: the stride of a sample, 0 where all have the same bounds, and that from start to end."""
    return bounds.stride(1) if bounds.shape[1] > 1 else 0, bounds.stride(0)


def _run(out: Tensor, query: Tensor, key: Tensor, weights: Tensor, visible: Tensor | None, scale: float) -> None:
    if out.numel() == 0:
        return
    query, key = map(adjacent, (query, key))
    # Of a head, the weights of adjacent queries are adjacent.
    weights = weights.transpose(1, 2).contiguous()
    batch, length, heads, width = query.shape
    strides, unit, columns = layout(query, key)
    size = tile(query.element_size(), columns, compute_capability(query.device))
    if visible is not None:
        visible = adjacent(visible)
    limits = (0, 0) if visible is None else bounds_strides(visible)
    _launch(
        (cdiv(length, size.queries) * cdiv(key.shape[1], size.keys), batch, 1),
        (query, key, weights, visible, out),
        (*strides, weights.stride(0), weights.stride(2), weights.stride(1), *limits),
        (length, key.shape[1], heads, float(scale)),
        (visible is not None, width, columns, unit, size.queries, size.keys, size.stages),
        size.warps,
    )


_scores = launch_op(
    "indexer_scores(Tensor query, Tensor key, Tensor weights, Tensor? visible, float scale) -> Tensor",
    lambda query, key, *_: query.new_empty(*query.shape[:2], key.shape[1], dtype=torch.float32),
    _run,
)
