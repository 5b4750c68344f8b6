"""How classes of a module separate sequences and read masks and padding. Does not import torch."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

# Discovery loads it first, so this does not import its package, which imports torch.
from opslot.ops.attention.forms import OP, READS_BOOLS, adds_given_masks, cu_seqlens_branches, is_sparse, mask_of
from opslot.patchgen.forms import ClassFact, ModuleView, Skip
from opslot.patchgen.upstream import find_nodes
from opslot.slots.protocol import ALL_PADDING, CU_SEQLENS_FOR_FLASH, FIRST_PADDING, MASKS_OF, READS_PADDING

_ASK_BINDING = """\
from opslot.ops.attention.calls import or_bound_with_cu_seqlens

is_flash_attention_requested = or_bound_with_cu_seqlens(is_flash_attention_requested)
"""


def find_cu_seqlens_for_flash(module: ModuleView) -> Iterator[ClassFact]:
    """Classes that separate sequences by cu_seqlens where a FlashAttention of Transformers runs, as towers do."""
    for name, forward in module.methods():
        if cu_seqlens_branches(module, forward):
            yield ClassFact(name, CU_SEQLENS_FOR_FLASH, True, _ASK_BINDING)


# Reads of the first position, and of the last one or all, of any tensor and of hidden states.
_READS_FIRST = r"\[:, 0(?:, :)?\]"
_READS_LAST_OR_ALL = r"(?:\[:, -1(?:, :)?\]|\.mean\((?:dim=|axis=)?1\b)"
_HIDDEN = r"(?:hidden|states?|features|embeddings|embeds|outputs?)(?:\[-?\d+\])?"
_FIRST = re.compile(_HIDDEN + _READS_FIRST)
_LAST_OR_ALL = re.compile(rf"{_HIDDEN}{_READS_LAST_OR_ALL}|\bmean\(\w*{_HIDDEN}, (?:dim=|axis=)?1\b")
# Methods of Transformers' classes that compute what a model returns.
_MAY_POOL = re.compile(r"forward|get_\w+_features")
_ANY_FIRST = re.compile(rf"(?<!mask)(?<!ids)(?<!labels){_READS_FIRST}")
_ANY_LAST_OR_ALL = re.compile(rf"(?<!mask)(?<!ids)(?<!labels){_READS_LAST_OR_ALL}|\bmean\(\w+, (?:dim=|axis=)?1\b")

# Convolutions of the hidden states that attention returned, those of tokens next to padding included.
_CONVOLVES = re.compile(r"Adapter|ResNetBlock")

# Labels of all positions, of which none can be -100.
_ONE_HOT_LABELS = re.compile(r"argmax\(labels\.")


def find_readers_of_padding(module: ModuleView) -> Iterator[ClassFact]:
    """Encoders and their heads, also a user's, whose output is that of a position which may be padding and attends to
    the tokens, question answering, whose loss compares all positions with that of the answer, the classification of
    frames, whose loss is of all positions, and convolutions of what attention returned."""
    masks_padding = module.called_by_methods("create_bidirectional_mask")
    around = _is_around_models(module)
    own = around and module.upstream.own is not None
    first, last_or_all = (_ANY_FIRST, _ANY_LAST_OR_ALL) if own else (_FIRST, _LAST_OR_ALL)
    for name in module.classes if masks_padding or around else ():
        methods = [m for m in module.own_methods(name) if m != "__init__" and (own or _MAY_POOL.fullmatch(m))]
        text = "\n".join(module.text(f"{name}.{method}") for method in methods)
        if last_or_all.search(text):
            yield ClassFact(name, READS_PADDING, ALL_PADDING)
        elif first.search(text):
            yield ClassFact(name, READS_PADDING, FIRST_PADDING)
        elif _ONE_HOT_LABELS.search(text):
            yield ClassFact(name, READS_PADDING, ALL_PADDING)
    for name in module.classes:
        convolves = _CONVOLVES.search(name) and "nn.Conv1d(" in module.text(f"{name}.__init__")
        if "ForQuestionAnswering" in name or (masks_padding and convolves):
            yield ClassFact(name, READS_PADDING, ALL_PADDING)


def _is_around_models(module: ModuleView) -> bool:
    """Whether a module may have heads of other modules' encoders, as ModernVBERT's has: it makes no masks itself."""
    return not re.search(r"\bcreate_\w*mask\w*\(", module.upstream.text)


def find_masks_of_one_implementation(module: ModuleView) -> Iterator[Skip | ClassFact]:
    """Attention that reads any mask as one implementation makes it.

    Sparse attention whose indexer adds any mask to scores: Transformers' sdpa gives it none, or one of bools, so that
    GLM's in Transformers 5.9 selects and sees later tokens. Doge's does too, because its own mask is added to a
    causal one only where it gets one (up to 5.17). Attention without the interface that reads bools: Gemma 4's of audio
    up to 5.17, which sees what eager attention's masks hide.
    """
    for name, forward in module.methods():
        if is_sparse(module, forward):
            if adds_given_masks(module):
                yield ClassFact(name, MASKS_OF, "eager")
        elif _adds_own_mask(module, name):
            yield ClassFact(name, MASKS_OF, "eager")
        elif READS_BOOLS in module.text(forward) and "Attention" in name:
            yield ClassFact(name, MASKS_OF, "sdpa")
            yield Skip(name, OP, "computes attention itself, with masks of bools")


def _adds_own_mask(module: ModuleView, name: str) -> bool:
    """Whether a method of the class makes the mask of its attention, from the one that it gets if it gets one.

    Not where the module asks for one always.
    """
    calls = find_nodes(ast.Call, module.tree)
    if any(keyword.arg == "allow_is_causal_skip" for call in calls for keyword in call.keywords):
        return False
    masks = {mask_of(call) for call in module.calls(f"{name}.forward", "attention_interface")}
    makers = [
        ast.unparse(node.value.func).removeprefix("self.")
        for node in find_nodes(ast.Assign, module.upstream.find(f"{name}.forward"))
        if ast.unparse(node.targets[0]) in masks and isinstance(node.value, ast.Call)
    ]
    return any("attention_mask is not None" in module.text(f"{name}.{maker}") for maker in makers)


FORMS = (find_cu_seqlens_for_flash, find_readers_of_padding, find_masks_of_one_implementation)
