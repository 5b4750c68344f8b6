"""Attention by the kernel that is fastest for a call: by its lengths, window, documents and padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention
from transformers.masking_utils import flash_attention_mask

from opslot.ops._common.documents import longest_document
from opslot.ops.attention import triton
from opslot.ops.attention.contract import AttentionCall, takes_call
from opslot.ops.attention.flash import make_flash
from opslot.ops.attention.options import NARROW_WINDOW
from opslot.ops.attention.reference import OPTIONS, causal_of, window_of
from opslot.ops.attention.sdpa import cudnn
from opslot.ops.attention.widths import padded_widths

# Tokens of the longest document up to which `triton` is faster on an H200 without causality, forward and backward, and
# `cudnn` for whole rows: see the tables in `__init__.py`. Padding costs time where FlashAttention 4 has no kernel for a
# head size.
SHORT, SHORT_IF_PADDED = 256, 1024
# Tokens from which `cudnn_or_triton` takes cuDNN: the fewest that were compared.
_LONG = 512


def flash_4_or_triton() -> Callable[..., Any]:
    """FlashAttention 4, which this imports, `triton` for narrow causal windows and, without causality, for short
    documents, and `cudnn` for short rows, as in a tower."""
    flash = make_flash(4)

    @takes_call
    def attention(call: AttentionCall) -> tuple[Tensor, None]:
        """`op.reference`, but `attention_mask` is a [B, S] padding mask or None."""
        if not _is_narrow_or_short(call):
            kernel = flash
        else:
            causal = causal_of(call.module, call.kwargs)
            kernel = cudnn if not causal and _is_whole_row(call) else triton.attention
        return kernel(*call[:-1], **call.kwargs)

    attention.mask_function = flash_attention_mask  # type: ignore[attr-defined]
    return attention


def _is_narrow_or_short(call: AttentionCall) -> bool:
    module, query, key, value, *_, kwargs = call
    if causal_of(module, kwargs):
        window = kwargs.get("sliding_window")
        return window is not None and window <= NARROW_WINDOW
    cu_seqlens = kwargs.get("cu_seq_lens_q")
    longest = query.shape[2] if cu_seqlens is None else longest_document(cu_seqlens, kwargs.get("max_length_q"))
    widths = query.shape[-1], value.shape[-1]
    grouped = query.shape[1] != key.shape[1]
    return longest <= (SHORT if padded_widths(4, *widths, grouped=grouped) == widths else SHORT_IF_PADDED)


@takes_call
def cudnn_or_triton(call: AttentionCall) -> tuple[Tensor, None]:
    """`op.reference` without softcap, sinks and dropout; `attention_mask` is a [B, S] padding mask or None."""
    kernel = cudnn if call.query.shape[2] >= _LONG and _is_whole_row(call) else triton.attention
    return kernel(*call[:-1], **call.kwargs)


cudnn_or_triton.mask_function = flash_attention_mask  # type: ignore[attr-defined]


def _is_whole_row(call: AttentionCall) -> bool:
    """Whether cuDNN supports a call, and its rows have no documents, padding or window."""
    module, query, key, value, mask, dropout, _, kwargs = call
    is_whole = kwargs.get("cu_seq_lens_q") is None and mask is None and window_of(key, kwargs) is None
    is_whole = is_whole and all(kwargs.get(option) is None for option in OPTIONS)
    # cuDNN's check would break a compiled graph.
    if not is_whole or key.shape[2] != query.shape[2] or torch.compiler.is_compiling():
        return False
    grouped = query.shape[1] != key.shape[1]
    return can_use_cudnn_attention(
        SDPAParams(query, key, value, None, dropout, causal_of(module, kwargs), grouped), False
    )
