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
        causal = getattr(module, "is_causal", True)
        attention_mask = _block_mask(query, causal, kwargs.get("cu_seq_lens_q"), kwargs.get("sliding_window"))
    out = flex_attention_forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
    return out[0], None


flex_attention.mask_function = flex_attention_mask  # type: ignore[attr-defined]


def _block_mask(query: Tensor, causal: bool, cu_seqlens: Tensor | None, window: int | None) -> BlockMask | None:
    """Same document, and under `causal` not later and at most `window` - 1 tokens earlier; None where all see all."""
    batch, _, length, _ = query.shape
    if cu_seqlens is None and not causal:
        return None
    if cu_seqlens is None:
        document = torch.zeros(batch, length, dtype=torch.long, device=query.device)
    else:
        token = torch.arange(batch * length, device=query.device)
        document = torch.searchsorted(cu_seqlens[1:].long(), token, right=True).view(batch, length)

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        same = document[b, q] == document[b, k]
        if not causal:
            return same
        same = same & (q >= k)
        return same if window is None else same & (q - k < window)

    return create_block_mask(visible, None if cu_seqlens is None else batch, None, length, length, device=query.device)
