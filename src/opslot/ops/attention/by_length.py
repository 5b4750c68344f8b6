"""FlashAttention 4 for long sequences and opslot's Triton kernel for short ones, such as windows of a vision tower."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers.masking_utils import flash_attention_mask

from opslot.ops._common.documents import longest_document
from opslot.ops.attention import triton
from opslot.ops.attention.flash import make_flash

# In tokens, from forward and backward on an H200: see the table in `__init__.py`.
SHORT = 768


def make_attention() -> Callable[..., Any]:
    """Attention with the kernel that is faster for the longest document; imports FlashAttention 4."""
    flash = make_flash(4)

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """`op.reference`, but `attention_mask` is a [B, S] padding mask or None."""
        cu_seqlens = kwargs.get("cu_seq_lens_q")
        longest = query.shape[2] if cu_seqlens is None else longest_document(cu_seqlens, kwargs.get("max_length_q"))
        kernel = triton.attention if longest <= SHORT else flash
        return kernel(module, query, key, value, attention_mask, **kwargs)

    attention.mask_function = flash_attention_mask  # type: ignore[attr-defined]
    return attention
