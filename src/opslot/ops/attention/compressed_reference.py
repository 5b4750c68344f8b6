"""Attention to a sliding window and to compressed keys in plain PyTorch, with a dense mask."""

from __future__ import annotations

import torch
from torch import Tensor

from opslot.ops.attention.contract import AttentionCall, takes_call
from opslot.ops.attention.reference import reference as dense_reference
from opslot.ops.attention.reference import visible


@takes_call
def reference(call: AttentionCall) -> tuple[Tensor, None]:
    """Causal attention within `sliding_window` tokens, and to the last `compressed_keys` keys (0 by default).

    `query` is [B, heads, S, D]; `key` [B, 1, W + T, D] are the W keys of tokens and T compressed ones, and `value` is
    the same tensor, or None. `selected` are the compressed keys that each query sees: their indices [B, S, K], -1 for
    none and none twice, or how many of the first ones [B, S]; by default all. `attention_mask` [B, W] hides padding
    among the keys of tokens. `s_aux` and `cu_seq_lens_q` are those of other attention.
    """
    module, query, key, _, attention_mask, dropout, scaling, kwargs = call
    keys = kwargs.get("compressed_keys", 0)
    near = key[:, :, : key.shape[2] - keys]
    mask = visible(module, query, near, kwargs)
    shape = (query.shape[0], 1, query.shape[2])
    mask = query.new_ones(*shape, near.shape[2], dtype=torch.bool) if mask is None else mask
    if attention_mask is not None:
        mask = mask & attention_mask[:, None, None, -near.shape[2] :].bool()
    far = selected_mask(kwargs.get("selected"), keys)
    far = query.new_ones(*shape, keys, dtype=torch.bool) if far is None else far[:, None]
    mask = torch.cat([mask.expand(*shape, -1), far], -1)
    return dense_reference(module, query, key, key, mask, dropout, scaling, s_aux=kwargs.get("s_aux"))


def selected_mask(selected: Tensor | None, keys: int) -> Tensor | None:
    """`selected` as a bool mask [B, S, T]."""
    if selected is None:
        return None
    if selected.dim() == 2:
        return torch.arange(keys, device=selected.device) < selected[..., None]
    mask = selected.new_zeros(*selected.shape[:2], keys + 1, dtype=torch.bool)
    return mask.scatter_(-1, selected.long().where(selected >= 0, keys), True)[..., :keys].contiguous()
