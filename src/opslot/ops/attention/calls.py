"""What generated modules call for their attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from opslot.ops.attention.reference import unpack_bits
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
        # All rows share their positions, and so the counts of visible keys.
        selected = selected.expand(compressed.shape[0], -1)
    return {"compressed_keys": compressed.shape[2], "selected": selected}


def selects_bits(mask: Any) -> bool:
    """Whether an indexer returns the selected keys as bits."""
    return isinstance(mask, Visible)


def mask_of(mask: Any) -> Any:
    """The mask that a model passes to its attention, of which an indexer may get `Visible`."""
    return mask.mask if isinstance(mask, Visible) else mask


def visible_by_mask(mask: Any) -> Visible:
    """`mask` where an indexer gets `Visible`, else the keys that a dense mask [B, 1, S, T] shows."""
    if isinstance(mask, Visible):
        return mask
    return Visible(None, (mask if mask.dtype == mask.bool().dtype else mask == 0)[:, 0])


def dense_mask(bits: Any, keys: int) -> Any:
    """Bool [B, 1, S, keys] of the bits of selected keys."""
    return unpack_bits(bits, keys)[:, None]
