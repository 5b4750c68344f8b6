"""Scores of blocks of keys in Triton: the highest product of each query and head with a key in the block.

Products of queries and keys are never in memory. Blocks without a visible key are filled without computing them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from opslot._base.jit import dot
from opslot._base.kernel_launch import KernelLauncher, cdiv
from opslot.ops._common.arguments import adjacent, in_autocast_dtype, reject, require_floats
from opslot.ops._common.custom_op import launch_op
from opslot.ops.indexer_scores.triton import WIDEST, Tile

_KERNEL = "indexer_scores_implementation='triton'"
# These fit into 99 KiB of shared memory, that of the smallest supported GPUs.
_HALF, _WIDE = Tile(128, 64, 4, 2), Tile(32, 64, 4, 1)


def block_max(query: Tensor, key: Tensor, blocks: Tensor, visible: Tensor) -> Tensor:
    """`op.block_max`, in autocast's dtype where autocast is on.

    Raises:
        KernelError: unsupported shapes, dtypes or devices.
    """
    require_floats(_KERNEL, query=query, key=key)
    batch, length, _, width = query.shape
    if width > WIDEST:
        reject(_KERNEL, "query", f"its head size is {width}, supported are sizes up to {WIDEST}", "use eager")
    if key.dim() != 3 or key.shape[0] != batch or key.shape[2] != width:
        found = f"its shape is {tuple(key.shape)} beside query's {tuple(query.shape)}"
        reject(_KERNEL, "key", found, "pass one head of keys [B, T, D]")
    for name, bounds, size in (("blocks", blocks, blocks.shape[-1]), ("visible", visible, length)):
        if bounds.dim() != 3 or bounds.shape != (2, bounds.shape[1], size) or bounds.shape[1] not in (1, batch):
            reject(_KERNEL, name, f"its shape is {tuple(bounds.shape)}", f"pass int32 [2, B or 1, {size}]")
        if bounds.dtype != torch.int32:
            reject(_KERNEL, name, f"it is {bounds.dtype}", f"pass int32 [2, B or 1, {size}]")
    query, key = in_autocast_dtype(query, key)
    dtype = torch.promote_types(query.dtype, key.dtype)
    with torch.no_grad():
        return _scores(query.to(dtype), key.to(dtype), blocks, visible)


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
    column = tl.arange(0, D)
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
    q_mask = valid[:, None] & (column < WIDTH)[None, :]
    q = tl.load(q_ptr + token.to(tl.int64)[:, None] * q_token_stride + column[None, :], mask=q_mask, other=0.0)
    k_ptr += b * (k_batch_stride // UNIT * UNIT)
    highest = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    for at in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        key = at + tl.arange(0, BLOCK_N)
        inside = key < last
        k_mask = inside[:, None] & (column < WIDTH)[None, :]
        k = tl.load(k_ptr + key.to(tl.int64)[:, None] * k_token_stride + column[None, :], mask=k_mask, other=0.0)
        products = dot(q, tl.trans(k), tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32))
        seen = inside[None, :] & (key[None, :] >= start[:, None]) & (key[None, :] < end[:, None])
        highest = tl.maximum(highest, tl.max(tl.where(seen, products, float("-inf")), 1))
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
    strides = (*query.stride()[:3], *key.stride()[:2])
    unit = 8 if all(stride % 8 == 0 for stride in strides) else 1
    columns = max(16, triton.next_power_of_2(width))
    size = _WIDE if query.element_size() > 2 or columns > 128 else _HALF
    bounds = [stride for x in (blocks, visible) for stride in (x.stride(1) if x.shape[1] > 1 else 0, x.stride(0))]
    _launch(
        (cdiv(length, size.queries) * out.shape[3], batch * heads, 1),
        (query, key, blocks, visible, out),
        (*strides, *bounds),
        (length, heads, out.shape[3]),
        (width, columns, unit, size.queries, size.keys, size.stages),
        size.warps,
    )


_scores = launch_op(
    "block_max_scores(Tensor query, Tensor key, Tensor blocks, Tensor visible) -> Tensor", _allocate, _run
)
