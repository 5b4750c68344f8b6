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


def mask_of(mask: Any) -> Any:
    """The mask that a model passes to its attention, of which an indexer may get `Visible`."""
    return mask.mask if isinstance(mask, Visible) else mask


def visible_by_mask(mask: Any) -> Visible:
    """`mask` where an indexer gets `Visible`, else the keys that a dense mask [B, 1, S, T] shows."""
    if isinstance(mask, Visible):
        return mask
    return Visible(None, (mask if mask.dtype == mask.bool().dtype else mask == 0)[:, 0])


def visible_where(shown: Any) -> Visible:
    """The keys of a mask bool [B, S, T]."""
    return Visible(None, shown)


def dense_mask(bits: Any, keys: int) -> Any:
    """Bool [B, 1, S, keys] of the bits of selected keys."""
    from opslot.ops.attention.reference import unpack_bits

    return unpack_bits(bits, keys)[:, None]


def keys_of_all_ranks(*args: Any) -> Any:
    """Keys of the whole sequence; see `indexed.keys_of_all_ranks`."""
    from opslot.ops.attention import indexed

    return indexed.keys_of_all_ranks(*args)


def pools_of(*args: Any) -> Any:
    """The pools of keys that an indexer selects; see `pools.pools_of`."""
    from opslot.ops.attention import pools

    return pools.pools_of(*args)


def select_pools(*args: Any) -> Any:
    """The keys of the selected pools as bits; see `pools.select_pools`."""
    from opslot.ops.attention import pools

    return pools.select_pools(*args)


def select_blocks(*args: Any) -> Any:
    """The keys of the selected blocks as bits; see `pools.select_blocks`."""
    from opslot.ops.attention import pools

    return pools.select_blocks(*args)


def blocks_before(position_ids: Any, keys: int, size: int) -> Any:
    """Blocks of `size` keys of `keys`, and the keys up to each position: arguments of block_max in indexer_scores."""
    from opslot.ops.attention import pools

    return pools.blocks_before(position_ids, keys, size)
