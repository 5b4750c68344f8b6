"""Scores of blocks of keys in Triton: the highest score of each query and head with a key in the block.

Products of queries and keys are never in memory. Blocks without a visible key are filled without computing them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from opslot._base.jit import dot
from opslot._base.kernel_launch import KernelLauncher, cdiv
from opslot.ops._common.arguments import adjacent, in_autocast_dtype, in_one_dtype, reject, require_floats
from opslot.ops._common.custom_op import launch_op
from opslot.ops.indexer_scores.triton import (
    KERNEL,
    ScoresTile,
    bounds_strides,
    layout,
    load_tile,
    require_heads,
    seen_keys,
)

# These fit into 99 KiB of shared memory, that of the smallest supported GPUs.
_HALF, _WIDE = ScoresTile(128, 64, 4, 2), ScoresTile(32, 64, 4, 1)


def block_max(query: Tensor, key: Tensor, blocks: Tensor, visible: Tensor) -> Tensor:
    """`op.block_max`, in autocast's dtype where autocast is on.

    Raises:
        KernelError: unsupported shapes, dtypes or devices.
    """
    require_floats(KERNEL, query=query, key=key)
    batch, length, _, _ = query.shape
    require_heads(query, key)
    for name, bounds, size in (("blocks", blocks, blocks.shape[-1]), ("visible", visible, length)):
        if bounds.dim() != 3 or bounds.shape != (2, bounds.shape[1], size) or bounds.shape[1] not in (1, batch):
            reject(KERNEL, name, f"its shape is {tuple(bounds.shape)}", f"pass int32 [2, B or 1, {size}]")
        if bounds.dtype != torch.int32:
            reject(KERNEL, name, f"it is {bounds.dtype}", f"pass int32 [2, B or 1, {size}]")
    with torch.no_grad():
        return _scores(*in_one_dtype(*in_autocast_dtype(query, key)), blocks, visible)


@triton.jit(do_not_specialize=["queries", "heads", "count"])
def _block_max_kernel(
    q_ptr,
    k_ptr,
    blocks_ptr,
    visible_ptr,
    out_ptr,
    q_batch_stride,
    q_token_stride,
    q_head_stride,
    k_batch_stride,
    k_token_stride,
    blocks_stride,
    blocks_size,
    visible_stride,
    visible_size,
    queries,
    heads,
    count,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The scores of block `program_id(0)` % `count` for a tile of queries of one head."""
    b = tl.program_id(1).to(tl.int64) // heads
    head = tl.program_id(1) % heads
    block = tl.program_id(0) % count
    token = tl.program_id(0) // count * BLOCK_M + tl.arange(0, BLOCK_M)
    valid = token < queries
    # Known to be multiples of UNIT, which loads of 16 bytes require.
    q_token_stride = q_token_stride // UNIT * UNIT
    k_token_stride = k_token_stride // UNIT * UNIT

    visible_ptr += b * visible_stride + token
    start = tl.load(visible_ptr, mask=valid, other=0)
    end = tl.load(visible_ptr + visible_size, mask=valid, other=0)
    blocks_ptr += b * blocks_stride + block
    first = tl.load(blocks_ptr)
    last = tl.minimum(tl.load(blocks_ptr + blocks_size), tl.max(end, 0))
    q_ptr += b * (q_batch_stride // UNIT * UNIT) + head.to(tl.int64) * (q_head_stride // UNIT * UNIT)
    q = load_tile(q_ptr, token, q_token_stride, valid, WIDTH, D)
    k_ptr += b * (k_batch_stride // UNIT * UNIT)
    highest = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    for at in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        key = at + tl.arange(0, BLOCK_N)
        inside = key < last
        k = load_tile(k_ptr, key, k_token_stride, inside, WIDTH, D)
        head_scores = dot(q, tl.trans(k), tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32))
        seen = inside[None, :] & seen_keys(key, start, end)
        highest = tl.maximum(highest, tl.max(tl.where(seen, head_scores, float("-inf")), 1))
    out_ptr += ((b * heads + head) * queries + token.to(tl.int64)) * count + block
    tl.store(out_ptr, highest, mask=valid)


_launch = KernelLauncher(_block_max_kernel)


def _allocate(query: Tensor, key: Tensor, blocks: Tensor, visible: Tensor) -> Tensor:
    batch, length, heads, _ = query.shape
    return query.new_empty(batch, heads, length, blocks.shape[2], dtype=torch.float32)


def _run(out: Tensor, query: Tensor, key: Tensor, blocks: Tensor, visible: Tensor) -> None:
    if out.numel() == 0:
        return
    query, key, blocks, visible = map(adjacent, (query, key, blocks, visible))
    batch, length, heads, width = query.shape
    strides, unit, columns = layout(query, key)
    size = _WIDE if query.element_size() > 2 or columns > 128 else _HALF
    _launch(
        (cdiv(length, size.queries) * out.shape[3], batch * heads, 1),
        (query, key, blocks, visible, out),
        (*strides, *bounds_strides(blocks), *bounds_strides(visible)),
        (length, heads, out.shape[3]),
        (width, columns, unit, size.queries, size.keys, size.stages),
        size.warps,
    )


_scores = launch_op(
    "block_max_scores(Tensor query, Tensor key, Tensor blocks, Tensor visible) -> Tensor", _allocate, _run
)
