"""FlashAttention 4 for long sequences and opslot's Triton kernel for short ones, such as windows of a vision tower."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers.masking_utils import flash_attention_mask

from opslot.ops._common.documents import longest_document
from opslot.ops.attention import triton
from opslot.ops.attention.contract import AttentionCall, takes_call
from opslot.ops.attention.flash import make_flash
from opslot.ops.attention.widths import padded_widths

# Tokens up to which `triton` is faster on an H200, forward and backward: see the table in `__init__.py`. Padding costs
# time where FlashAttention 4 has no kernel for a head size.
SHORT, SHORT_IF_PADDED = 256, 1024


def make_attention() -> Callable[..., Any]:
    """Attention with the kernel that is faster for the longest document; imports FlashAttention 4."""
    flash = make_flash(4)

    @takes_call
    def attention(call: AttentionCall) -> tuple[Tensor, None]:
        """`op.reference`, but `attention_mask` is a [B, S] padding mask or None."""
        _, query, key, value, *_, kwargs = call
        cu_seqlens = kwargs.get("cu_seq_lens_q")
        longest = query.shape[2] if cu_seqlens is None else longest_document(cu_seqlens, kwargs.get("max_length_q"))
        widths = query.shape[-1], value.shape[-1]
        grouped = query.shape[1] != key.shape[1]
        short = SHORT if padded_widths(4, *widths, grouped=grouped) == widths else SHORT_IF_PADDED
        kernel = triton.attention if longest <= short else flash
        return kernel(*call[:-1], **kwargs)

    attention.mask_function = flash_attention_mask  # type: ignore[attr-defined]
    return attention
