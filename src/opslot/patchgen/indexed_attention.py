"""Attention to the keys that an indexer selects (DeepSeek-V3.2, GLM-5, Qwen4, MiniMax-M3).

Where a kernel of attention is bound, an indexer gets which keys each query sees instead of a mask, and returns those
that it selects as bits, which the kernel takes instead of a mask.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from opslot.patchgen.config import PatchConfig
from opslot.patchgen.forms import ModuleView

VARIANT = "indexed"
_TAKES = "takes_selected_keys(self.config)"
_VISIBLE = "visible_keys(self, query_states, key_states, attention_mask, kwargs)"
_WITH_BITS = '{{**kwargs, "selected_bits": {bits}}}'


@dataclass(frozen=True)
class IndexedForm:
    """How a class uses its indexer.

    Attributes:
        statements: the statements or expressions that the form consists of, each of which is in the method once, and
            what replaces them.
        masks: how often the method assigns attention_mask.
        helper: a method that makes the mask, with its fingerprint.
    """

    statements: tuple[tuple[str, str], ...]
    masks: int
    helper: tuple[str, str] | None = None

    def matches(self, module: ModuleView, name: str) -> bool:
        forward = f"{name}.forward"
        assigned = len(re.findall(r"\battention_mask = ", module.text(forward)))
        if assigned != self.masks or not all(module.count(forward, pattern) == 1 for pattern, _ in self.statements):
            return False
        return self.helper is None or module.fingerprint(f"{name}.{self.helper[0]}") == self.helper[1]

    def write(self, patch: PatchConfig, name: str) -> None:
        """Pass the indexer which keys each query sees, and a kernel the bits of those that it selects."""
        for pattern, replacement in self.statements:
            if replacement != "$match":
                patch.replace(f"{name}.forward", pattern, replacement)
        patch.add_import("opslot.ops.attention.calls", ["takes_selected_keys"])
        patch.add_import("opslot.ops.attention.indexed", ["visible_keys"])


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
_PASSES_BITS = f"$match\nif {_TAKES}:\n    kwargs, {{indices}} = {_WITH_BITS}, None"


def _of_indices(keys: str, given: str) -> IndexedForm:
    """DeepSeek-V3.2: indices of keys, from this layer's indexer or an earlier one's."""
    return IndexedForm(
        (
            (_PASSES_INDICES, "$match"),
            (_INDEX_MASK.format(keys=keys), "$match"),
            (given, f"({_VISIBLE} if {_TAKES} else $match)"),
            (
                "sparse_indices = topk_indices",
                _PASSES_BITS.format(indices="sparse_indices", bits="topk_indices"),
            ),
        ),
        masks=2,
    )


_SELECTED_MASK = """\
selected_token_mask = self.indexer(hidden_states, position_embeddings, attention_mask, {cache})
if attention_mask.dtype == torch.bool:
    attention_mask = attention_mask & selected_token_mask
else:
    attention_mask = attention_mask.masked_fill(~selected_token_mask, torch.finfo(attention_mask.dtype).min)"""
_INTERFACE = """\
attention_interface: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
    self.config._attn_implementation, eager_attention_forward
)"""
_SELECTS_POOLS = f"""\
if {_TAKES}:
    visible = {_VISIBLE}
    bits = self.indexer(hidden_states, all_position_embeddings, visible, {{cache}})
    kwargs = {{{{**kwargs, "selected_bits": bits}}}}
$match"""


def _of_mask(cache: str) -> IndexedForm:
    """Qwen4: a mask of the keys in selected pools, made before keys and queries."""
    return IndexedForm(
        (
            (
                _SELECTED_MASK.format(cache=cache),
                f"all_position_embeddings = position_embeddings\nif not {_TAKES}:\n    $match",
            ),
            (_INTERFACE, _SELECTS_POOLS.format(cache=cache)),
        ),
        masks=2,
    )


_BLOCK_MASK = """\
if self.config._attn_implementation in ('eager', 'sdpa'):
    attention_mask = self.indexer.build_block_mask($*args)"""
_BLOCK_INDEXER = "self.indexer(hidden_states, position_embeddings, $cache, {given})"
# MiniMax-M3: indices of blocks of keys, of each key/value head.
_OF_BLOCKS = IndexedForm(
    (
        (
            _BLOCK_INDEXER.format(given="position_ids"),
            _BLOCK_INDEXER.format(given=f"{_VISIBLE} if {_TAKES} else position_ids"),
        ),
        (_BLOCK_MASK, _PASSES_BITS.format(indices="block_indices", bits="block_indices")),
    ),
    masks=1,
)
_POOL_INDEXER = "self.indexer(hidden_states=hidden_states, q_resid=q_resid, attention_mask={given}, {cache}={cache})"
_POOL_MASK = """\
attention_mask = self.build_attention_mask_from_topk(
    topk_indices=topk_indices, query_states=query_states, kv_length=key_states.shape[2]
)"""
_PASSES_POOLS = f"""\
if {_TAKES}:
    kwargs, attention_mask = {_WITH_BITS.format(bits="topk_indices")}, None
else:
    $match"""


def _of_pools(cache: str) -> IndexedForm:
    """GLM-5.3: indices of the keys in selected pools, from this layer's indexer or an earlier one's."""
    given = f"{_VISIBLE} if {_TAKES} else attention_mask"
    return IndexedForm(
        (
            (
                _POOL_INDEXER.format(given="attention_mask", cache=cache),
                _POOL_INDEXER.format(given=given, cache=cache),
            ),
            (_POOL_MASK, _PASSES_POOLS),
        ),
        masks=1,
        helper=("build_attention_mask_from_topk", "627a789bb155"),
    )


# What methods call their cache: from Transformers 5.24 on, and before.
_CACHES = ("cache", "past_key_values")
_FORMS = (
    *(
        _of_indices(keys, given)
        for keys in ("key_states.shape[2]", "key_states.shape[-2]")
        for given in ("attention_mask[:, 0, :, :]", "attention_mask[:, 0]")
    ),
    *map(_of_mask, _CACHES),
    _OF_BLOCKS,
    *map(_of_pools, _CACHES),
)


def form_of(module: ModuleView, name: str, selects_keys: Callable[[ModuleView, str], bool]) -> IndexedForm | None:
    """How a class attends to all keys that its indexer selects, and its mask shows; None where it does not.

    Args:
        selects_keys: whether the indexer of that name can return the selected keys as bits.
    """
    constructor = module.text(f"{name}.__init__")
    indexers = re.findall(r"\b(\w*Indexer)\(config, layer_idx\)", constructor)
    if len(indexers) != 1 or not selects_keys(module, indexers[0]):
        return None
    return next((form for form in _FORMS if form.matches(module, name)), None)
