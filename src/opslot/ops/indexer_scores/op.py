"""Scores of keys for each query by the indexer of sparse attention: contract, reference and cost.

DeepSeek-V3.2 (DeepSeek-AI 2025), "lightning indexer": the score of a key is the sum over the index heads of
weight * relu(scale * q . k). Attention then sees the keys with the highest scores. Which keys these are has no
gradient, so the scores have none either: Transformers computes them without gradients.

MiniMax-M3 scores blocks of keys: of each head, by the highest score of a query with a key in the block.

Shapes: B batch, S queries, T keys, H index heads, D their size, P blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from opslot.ops._common.model_config import sizes_of
from opslot.ops.indexer_scores.cases import BLOCK_CASES, CASES, benchmark_case
from opslot.slots import Cost, OpSpec, OpVariant


def standard(query: Tensor, key: Tensor, weights: Tensor, scale: float = 1.0, visible: Tensor | None = None) -> Tensor:
    """The scores [B, S, T] in float32 (float64 for float64), which have no gradient.

    Args:
        query: [B, S, H, D].
        key: [B, T, D], shared by all heads.
        weights: [B, S, H], of the heads of each query.
        scale: positive factor of the matmuls of queries and keys.
        visible: int32 [2, B or 1, S], the first key that each query sees and the one after the last. The scores of
            others are -inf.
    """
    dtype = torch.promote_types(query.dtype, torch.float32)
    with torch.no_grad():
        head_scores = query.to(dtype) @ key.to(dtype).transpose(-1, -2).unsqueeze(1)
        scores = (weights.to(dtype).unsqueeze(-2) @ (head_scores * scale).relu()).squeeze(-2)
        if visible is None:
            return scores
        position = torch.arange(key.shape[1], device=key.device)
        seen = (position >= visible[0, ..., None]) & (position < visible[1, ..., None])
        return scores.masked_fill(~seen, float("-inf"))


def block_max(query: Tensor, key: Tensor, blocks: Tensor, visible: Tensor) -> Tensor:
    """The scores [B, H, S, P] in float32 (float64 for float64), which have no gradient: the highest of q k in a block.

    Args:
        query: [B, S, H, D].
        key: [B, T, D], shared by all heads.
        blocks: int32 [2, B or 1, P], the first key of each block and the one after the last, in order; blocks after the
            last may be empty, from T to 0.
        visible: int32 [2, B or 1, S], the first key that each query sees and the one after the last. The scores of
            blocks without such a key are -inf.
    """
    dtype = torch.promote_types(query.dtype, torch.float32)
    with torch.no_grad():
        head_scores = query.transpose(1, 2).to(dtype) @ key.to(dtype).transpose(-1, -2).unsqueeze(1)
        position = torch.arange(key.shape[1], device=key.device)
        seen = (position >= visible[0, ..., None]) & (position < visible[1, ..., None])
        head_scores = head_scores.masked_fill(~seen[:, None], float("-inf"))
        found = head_scores.new_full((*head_scores.shape[:3], blocks.shape[2]), float("-inf"))
        first, end = blocks.contiguous()
        block = (
            torch.searchsorted(first, position.to(first.dtype).expand(first.shape[0], -1).contiguous(), right=True) - 1
        )
        inside = (block >= 0) & (position < end.gather(1, block.clamp(min=0)))
        head_scores = head_scores.masked_fill(~inside[:, None, None], float("-inf"))
        index = block.clamp(min=0)[:, None, None].expand_as(head_scores)
        return found.scatter_reduce_(-1, index, head_scores, "amax")


def _cost(arguments: Mapping[str, Any]) -> Cost:
    """Writes the scores; one matmul of each head, over half of the keys where these are limited."""
    query, keys = arguments["query"], arguments["key"].shape[1]
    batch, length, heads, width = query.shape
    flops = 2 * batch * length * keys * heads * width
    share = 2 if arguments.get("visible") is not None else 1
    return Cost(bytes=query.numel() * query.element_size() + 4 * batch * length * keys, flops=flops // share)


def _block_cost(arguments: Mapping[str, Any]) -> Cost:
    """Writes the scores; one matmul of each head, over half of the keys."""
    query, keys, blocks = arguments["query"], arguments["key"].shape[1], arguments["blocks"].shape[2]
    batch, length, heads, width = query.shape
    bytes_moved = query.numel() * query.element_size() + 4 * batch * heads * length * blocks
    return Cost(bytes=bytes_moved, flops=batch * length * keys * heads * width)


OP = OpSpec(
    name="indexer_scores",
    description="scores by which the indexer of sparse attention selects keys",
    variants={
        "standard": OpVariant(
            "standard",
            standard,
            CASES,
            (),
            _cost,
            static_shape=lambda request: sizes_of(request.config, heads="index_n_heads", head_dim="index_head_dim"),
            benchmark_case=benchmark_case,
            description="weighted sum of relu(q k) over index heads (DeepSeek-V3.2 and V4, GLM-5, Qwen4)",
        ),
        "block_max": OpVariant(
            "block_max",
            block_max,
            BLOCK_CASES,
            (),
            _block_cost,
            description="highest q k in each block of keys (MiniMax-M3)",
        ),
    },
)
