"""Attention in plain PyTorch, and what its kernels share: causality, windows, masks, rejected options."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from opslot._base.errors import KernelError
from opslot.ops._common.documents import check_cu_seqlens, longest_document, same_document
from opslot.ops.attention.contract import AttentionCall, takes_call


@takes_call
def reference(call: AttentionCall) -> tuple[Tensor, None]:
    """softmax(scaling * q k^T + mask) v with grouped key/value heads.

    Without a mask, causal if `is_causal` or else `module.is_causal` is set (the last query sees every key), and limited
    to `sliding_window` tokens, without causality to `sliding_window - 1` tokens to either side. `softcap` caps the
    scores; `s_aux` [heads] are attention sinks, logits in the softmax without a value. `selected_bits` int32
    [B, S, ceil(S_kv / 32)] are all keys that each query sees, whatever else is given: bit i of word w is key 32 w + i;
    with [B, kv_heads, S, ...], those of each key/value head. The softmax runs in fp32 (fp64 for fp64 input), as
    Transformers' eager attention does.
    """
    module, query, key, value, attention_mask, dropout, scaling, kwargs = call
    reject_options("eager", kwargs, served=("softcap", "s_aux", "selected_bits"))
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(2, 3) * (scaling if scaling is not None else 1 / math.sqrt(query.shape[-1]))
    if kwargs.get("softcap") is not None:
        scores = kwargs["softcap"] * torch.tanh(scores / kwargs["softcap"])
    bits = kwargs.get("selected_bits")
    if bits is not None:
        attention_mask = unpack_bits(bits, key.shape[2])
        of_heads = attention_mask.dim() == 4
        attention_mask = attention_mask.repeat_interleave(groups, 1) if of_heads else attention_mask[:, None]
    elif attention_mask is None or kwargs.get("cu_seq_lens_q") is not None:
        attention_mask = visible(module, query, key, kwargs)
    if attention_mask is not None and attention_mask.is_floating_point():
        scores = scores + attention_mask
    elif attention_mask is not None:
        # Not -inf, which gives NaN in rows that see no key, as those of padding on the left.
        scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    dtype = torch.promote_types(scores.dtype, torch.float32)
    sinks = kwargs.get("s_aux")
    if sinks is not None:
        column = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], -1)
    weights = scores.softmax(-1, dtype=dtype)[..., : key.shape[2]].to(query.dtype)
    return (nn.functional.dropout(weights, dropout) @ value).transpose(1, 2).contiguous(), None


def unpack_bits(bits: Tensor, keys: int) -> Tensor:
    """Bool [..., S, keys] of int32 [..., S, ceil(keys / 32)]."""
    shifts = torch.arange(32, dtype=bits.dtype, device=bits.device)
    return ((bits[..., None] >> shifts) & 1).flatten(-2)[..., :keys].bool()


def pack_bits(mask: Tensor) -> Tensor:
    """Int32 [..., S, ceil(keys / 32)] of bool [..., S, keys]; the bits after the last key are 0."""
    words = nn.functional.pad(mask, (0, -mask.shape[-1] % 32)).unflatten(-1, (-1, 32)).to(torch.int64)
    return (words << torch.arange(32, device=mask.device)).sum(-1).to(torch.int32)


def causal_of(module: nn.Module, kwargs: Mapping[str, Any]) -> bool:
    """Whether this call is causal: `is_causal` of the call, else of the module."""
    causal = kwargs.get("is_causal")
    return getattr(module, "is_causal", True) if causal is None else causal


def window_of(key: Tensor, kwargs: Mapping[str, Any]) -> int | None:
    """`sliding_window` if it masks some key, else None."""
    window = kwargs.get("sliding_window")
    return None if window is None or window >= key.shape[2] else window


def visible(module: nn.Module, query: Tensor, key: Tensor, kwargs: Mapping[str, Any]) -> Tensor | None:
    """Bool mask [B or 1, 1, S, S_kv] of documents, causality and sliding window; None if every key is visible."""
    batch, length, keys = query.shape[0], query.shape[2], key.shape[2]
    causal = causal_of(module, kwargs)
    window = window_of(key, kwargs)
    cu_seqlens = kwargs.get("cu_seq_lens_q")
    if cu_seqlens is None and window is None and (not causal or length == 1):
        return None
    position = torch.arange(keys - length, keys, device=query.device)
    distance = position[:, None] - torch.arange(keys, device=query.device)
    mask = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    if window is not None:
        mask = mask & (distance < window)
        mask = mask if causal else mask & (distance > -window)
    if cu_seqlens is None:
        return mask[None, None]
    if length != keys:
        raise KernelError(
            f"attention: packed documents of {length} queries and {keys} keys in a row",
            hint="give every document as many keys as queries, or use flash_attention_2, 3 or 4",
        )
    return mask & same_document(cu_seqlens, batch, length, query.device)


def document_bounds(
    name: str, queries: Sequence[int], keys: Sequence[int], kwargs: Mapping[str, Any]
) -> tuple[Tensor, Tensor, int, int]:
    """cu_seqlens of queries and of keys, checked, and the tokens of the longest document of each.

    Args:
        name: the kernel's.
        queries, keys: their rows, and tokens of a row.
    """
    cu_q, cu_k = kwargs["cu_seq_lens_q"], kwargs.get("cu_seq_lens_k")
    bounds, longest = (cu_q, cu_q if cu_k is None else cu_k), []
    for side, cu_seqlens, (rows, length) in zip("qk", bounds, (queries, keys), strict=True):
        given = kwargs.get(f"max_length_{side}")
        if given is not None:
            given = longest_document(cu_seqlens, given)
        check_cu_seqlens(f"attn_implementation={name!r}", f"cu_seq_lens_{side}", cu_seqlens, rows, length, given)
        longest.append(longest_document(cu_seqlens, given))
    return bounds[0].contiguous(), bounds[1].contiguous(), longest[0], longest[1]


# Options that change the result, and the kernels that support them. Other kernels must reject them.
OPTIONS = {
    "softcap": "eager, triton, flex_attention or flash_attention_2, 3 or 4",
    "s_aux": "eager, triton or flash_attention_4",
    "selected_bits": "eager or triton",
    "position_bias": "Transformers' own attention",
}


def reject_options(name: str, kwargs: Mapping[str, Any], served: tuple[str, ...] = ()) -> None:
    """Raise KernelError for an option that implementation `name` does not support."""
    for option, others in OPTIONS.items():
        if option not in served and kwargs.get(option) is not None:
            raise KernelError(
                f"attn_implementation={name!r} has no {option}",
                hint=f"use {others}",
            )
