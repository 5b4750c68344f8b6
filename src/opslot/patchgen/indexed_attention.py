"""Attention to the keys that an indexer selects (DeepSeek-V3.2, GLM-5)."""

from __future__ import annotations

import re
from collections.abc import Callable

from opslot.patchgen.config import PatchConfig
from opslot.patchgen.forms import ModuleView

VARIANT = "indexed"
# Statements of the method: without a mask to make, it passes what the indexer returns.
_PASSES_INDICES = """\
if attention_mask.dtype == torch.bool:
    attention_mask = attention_mask & ~index_mask
else:
    attention_mask = attention_mask.masked_fill(index_mask, torch.finfo(hidden_states.dtype).min)"""
_INDEX_MASK = """\
index_mask = (
    topk_indices.new_ones((batch_size, seq_length, {keys}), dtype=torch.bool)
    .scatter(-1, topk_indices.long(), False)
    .unsqueeze(1)
)"""
_KEYS = ("key_states.shape[2]", "key_states.shape[-2]")
_INDEXER_MASKS = ("attention_mask[:, 0, :, :]", "attention_mask[:, 0]")
_CALLS = "opslot.ops.attention.calls"


def is_indexed(module: ModuleView, name: str, selects_keys: Callable[[ModuleView, str], bool]) -> bool:
    """Whether a class attends to all keys that its indexer selects, or one of an earlier layer, and its mask shows.

    Args:
        selects_keys: whether the indexer of that name can return the selected keys as bits.
    """
    forward, constructor = f"{name}.forward", module.text(f"{name}.__init__")
    indexers = re.findall(r"\b(\w*Indexer)\(config, layer_idx\)", constructor)
    if len(indexers) != 1 or not selects_keys(module, indexers[0]):
        return False
    masks = sum(module.count(forward, _INDEX_MASK.format(keys=keys)) for keys in _KEYS)
    given = sum(module.count(forward, mask) for mask in _INDEXER_MASKS)
    passed = module.count(forward, "sparse_indices = topk_indices")
    assigned = len(re.findall(r"\battention_mask = ", module.text(forward)))
    return (masks, given, passed, assigned) == (1, 1, 1, 2) and module.count(forward, _PASSES_INDICES) == 1


def write(patch: PatchConfig, name: str) -> None:
    """Pass the indexer of class `name` which keys each query sees, and a kernel the bits of those that it selects."""
    patch.replace(
        f"{name}.forward",
        _INDEXER_MASKS,
        "(visible_keys(self, query_states, key_states, attention_mask, kwargs) if takes_selected_keys(self.config)"
        " else $match)",
    )
    patch.insert_after(
        f"{name}.forward",
        "sparse_indices = topk_indices",
        "if takes_selected_keys(self.config):\n    kwargs, sparse_indices = "
        '{**kwargs, "selected_bits": topk_indices}, None',
    )
    patch.add_import(_CALLS, ["takes_selected_keys", "visible_keys"])
