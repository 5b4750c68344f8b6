"""Lets attention bound to a tower get cu_seqlens, which towers pass only to FlashAttention of Transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# In the name of an implementation that gets cu_seqlens. A name with "flash" would too, but Transformers constructs no
# model from a config with such a name unless it can load that FlashAttention.
CU_SEQLENS = "_cu_seqlens"


def or_bound_with_cu_seqlens(is_flash_attention_requested: Callable[..., bool]) -> Callable[..., bool]:
    """Transformers' function for a generated module, where it is also true for a bound kernel that takes cu_seqlens."""

    def requested(config: Any = None, *args: Any, **kwargs: Any) -> bool:
        name = getattr(config, "_attn_implementation", None)
        return (name is not None and CU_SEQLENS in name) or is_flash_attention_requested(config, *args, **kwargs)

    return requested
