"""What generated modules call for their attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from opslot.ops.attention.visible import Visible
from opslot.slots.protocol import is_own_attention

# In the name of an implementation that gets cu_seqlens. A name with "flash" would too, but Transformers constructs no
# model from a config with such a name unless it can load that FlashAttention.
CU_SEQLENS = "_cu_seqlens"


def or_bound_with_cu_seqlens(is_flash_attention_requested: Callable[..., bool]) -> Callable[..., bool]:
    """Transformers' function for a generated module, also true for a bound kernel that takes cu_seqlens.

    Towers pass cu_seqlens only to FlashAttention of Transformers.
    """

    def requested(config: Any = None, *args: Any, **kwargs: Any) -> bool:
        name = getattr(config, "_attn_implementation", None)
        return (name is not None and CU_SEQLENS in name) or is_flash_attention_requested(config, *args, **kwargs)

    return requested


def cross_attention_argument(config: Any, is_cross: bool) -> dict[str, bool]:
    """The argument that marks a call of opslot's kernels as cross attention, whose keys have their own padding."""
    return {"cross_attention": True} if is_cross and is_own_attention(config._attn_implementation) else {}


def takes_selected_keys(config: Any) -> bool:
    """Whether attention takes the compressed keys that each query sees as indices or counts, instead of as a mask."""
    return is_own_attention(config._attn_implementation)


def selected_keys(config: Any, compressed: Any, selected: Any) -> dict[str, Any]:
    """The arguments of opslot's kernels for `compressed` keys [B, 1, T, D] after those of tokens.

    Args:
        selected: indices [B, S, K] or counts [B or 1, S] of those that a query sees; None for all.
    """
    if not takes_selected_keys(config):
        return {}
    if selected is not None and selected.dim() == 2:
        # Of positions that all rows share.
        selected = selected.expand(compressed.shape[0], -1)
    return {"compressed_keys": compressed.shape[2], "selected": selected}


def visible_keys(module: Any, query: Any, key: Any, mask: Any, kwargs: dict[str, Any]) -> Visible:
    """What opslot's kernel of attention would show with `mask`; see `indexed.visible_keys`."""
    from opslot.ops.attention import indexed

    return indexed.visible_keys(module, query, key, mask, kwargs)


def selects_bits(mask: Any) -> bool:
    """Whether an indexer returns the selected keys as bits."""
    return isinstance(mask, Visible)


def select_keys(*args: Any) -> Any:
    """The selected keys as bits; see `indexed.select_keys`."""
    from opslot.ops.attention import indexed

    return indexed.select_keys(*args)
