"""FlexAttention, through Transformers' own adapter (block masks come from its mask function)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.masking_utils import flex_attention_mask


def flex_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | BlockMask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Contract: see `op.reference`.

    `attention_mask` is the block mask that Transformers makes, packed documents included; without one it is made here.
    """
    if attention_mask is None and query.shape[2] > 1:
        attention_mask = _block_mask(query, getattr(module, "is_causal", True), kwargs.get("cu_seq_lens_q"))
    out = flex_attention_forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
    return out[0], None


flex_attention.mask_function = flex_attention_mask  # type: ignore[attr-defined]


def _block_mask(query: Tensor, causal: bool, cu_seqlens: Tensor | None) -> BlockMask | None:
    batch, _, length, _ = query.shape
    if cu_seqlens is None:
        if not causal:
            return None
        return create_block_mask(lambda b, h, q, k: q >= k, None, None, length, length, device=query.device)
    token = torch.arange(batch * length, device=query.device)
    document = torch.searchsorted(cu_seqlens[1:].long(), token, right=True).view(batch, length)

    def same_document(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        same = document[b, q] == document[b, k]
        return same & (q >= k) if causal else same

    return create_block_mask(same_document, batch, None, length, length, device=query.device)
