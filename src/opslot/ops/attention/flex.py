"""FlexAttention, through Transformers' own adapter (block masks come from its mask function)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.masking_utils import flex_attention_mask


def flex_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Contract: see `op.reference`; `attention_mask` is the block mask that Transformers makes, packed documents included."""
    out = flex_attention_forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
    return out[0], None


flex_attention.mask_function = flex_attention_mask  # type: ignore[attr-defined]
