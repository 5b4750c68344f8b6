"""Transformers code that attention replaces: causal GQA self-attention with equal head sizes. Does not import torch.

A kernel is selected for a whole model, so the kernels must support all of its attention classes and masks.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from opslot.patchgen import Slot
from opslot.patchgen.forms import ClassFact, Match, ModuleView, Reviewed, Skip, names_in

OP = "attention"
EAGER = Reviewed("3a13cdc4bee1", "causal", "softmax(scale q k + mask) v over grouped heads", "169 architectures")

# Transformers' functions for masks that attention kernels support; the third is for other layers.
_MASKS = {"create_causal_mask", "create_sliding_window_causal_mask", "create_recurrent_attention_mask"}
_MASK_OPTIONS = {"or_mask_function", "and_mask_function", "block_sequence_ids"}
_ARGUMENTS = {"dropout", "scaling", "sliding_window", None}


@dataclass(frozen=True)
class Attention:
    """The attention classes of a module, all of them or none."""

    def find(self, module: ModuleView) -> Iterator[Match | Skip]:
        classes = [name for name, forward in module.methods() if "ALL_ATTENTION_FUNCTIONS" in module.text(forward)]
        if not classes:
            return
        reason = other_masks(module) or next((f"{n} {why}" for n in classes if (why := _difference(module, n))), "")
        if module.fingerprint("eager_attention_forward") != EAGER.hash:
            reason = "its eager attention is more than softmax(scale q k + mask) v"
        symbol, slot = ", ".join(classes), Slot(OP, EAGER.variant)
        if reason:
            yield Skip(symbol, OP, reason)
        else:
            yield Match(
                symbol,
                OP,
                EAGER.variant,
                lambda patch: patch.slot_config(classes, slot, depends=["eager_attention_forward"]),
            )


def other_masks(module: ModuleView) -> str:
    """Why not all masks of a module are causal, with or without a window, or ""."""
    nodes = module.nodes
    makers = {n.id for n in nodes if isinstance(n, ast.Name) and re.fullmatch(r"create_\w*mask\w*", n.id)}
    # As a keyword, or as a key of the keywords.
    options = {n.arg for n in nodes if isinstance(n, ast.keyword) and n.arg in _MASK_OPTIONS}
    options |= {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)} & _MASK_OPTIONS
    if not makers or options or makers - _MASKS:
        found = ", ".join(sorted(options | (makers - _MASKS))) or "no known function makes them"
        return f"its masks are not only causal: {found}"
    return ""


def masks_without_positions(module: ModuleView) -> str:
    """Why masks can't separate the documents of a packed sequence, or "".

    Documents are separated by position_ids that restart, which gpt-oss does not pass to its masks.
    """
    assigned = [node for node in module.nodes if isinstance(node, ast.Assign)]
    # mask_kwargs = {"position_ids": position_ids, ...}, and functions chosen by a condition before they are called.
    given = _targets(node for node in assigned if "position_ids" in _keys(node.value))
    given |= _targets(node for node in assigned if _copied(node.value) & given)
    chosen = _targets(node for node in assigned if isinstance(node.value, ast.IfExp) and _MASKS & names_in(node))
    for call in _calls_of(module, _MASKS | chosen):
        named = {keyword.arg for keyword in call.keywords}
        unpacked = set().union(*(names_in(keyword.value) for keyword in call.keywords if keyword.arg is None))
        if "position_ids" not in named and not unpacked & given:
            return "its masks are made without position_ids, so packed documents would attend to each other"
    return ""


def _difference(module: ModuleView, name: str) -> str:
    """Why a class's attention is not causal self-attention with equal head sizes, or ""."""
    calls = module.calls(f"{name}.forward", "attention_interface")
    if len(calls) != 1 or len(calls[0].args) != 5:
        return "calls attention in another way than the reviewed forms"
    unknown = {keyword.arg for keyword in calls[0].keywords} - _ARGUMENTS
    if unknown:
        return f"passes {', '.join(sorted(map(str, unknown)))} to attention"
    init = module.text(f"{name}.__init__")
    if "self.is_causal = True" not in init:
        return "is not causal"
    if "v_head_dim" in init:
        return "has values of another width than its keys"
    if {"key_value_states", "encoder_hidden_states"} & set(module.parameters(f"{name}.forward")):
        return "attends to other states than its own"
    return ""


def _calls_of(module: ModuleView, functions: set[str]) -> Iterator[ast.Call]:
    for node in module.nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in functions:
            yield node


def _targets(assigned: Iterator[ast.Assign]) -> set[str]:
    return {target.id for node in assigned for target in node.targets if isinstance(target, ast.Name)}


def _copied(node: ast.AST) -> set[str]:
    """The names whose `copy()` is called."""
    calls = (call.func for call in ast.walk(node) if isinstance(call, ast.Call))
    return set().union(*(names_in(f) for f in calls if isinstance(f, ast.Attribute) and f.attr == "copy"))


def _keys(node: ast.AST) -> set[str]:
    """The keys of a dictionary that is written out; none of anything else."""
    keys = node.keys if isinstance(node, ast.Dict) else ()
    return {key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}


# Forwards of decoder layers that mix tokens only in `self_attn`: fingerprint, what it is, where it was seen.
DECODER_LAYERS = {
    "617e1480c478": ("pre-norm", "llama, qwen2, qwen3, mistral and 66 more"),
    "a2fa8e7fd2fd": ("norms after attention and MLP", "olmo2, olmo3, exaone4, exaone4_5, olmo_hybrid"),
    "23e62b388574": ("norms before and after attention and MLP", "gemma2, gemma3, muse_glimmer"),
    "29fde2c5739a": ("norms before and after, by other names", "glm4"),
    "a49891701291": ("pre-norm with experts", "mixtral, minimax_m2, minimax_m3_vl, phimoe"),
    "dde365270b90": ("pre-norm with a residual multiplier", "granite, granite_swa, granite4_vision"),
    "497dae538611": ("attention and MLP in parallel", "cohere2, cohere2_moe, cohere_compass"),
    "03aeb224569a": ("pre-norm with dropout", "phi3, phi4_multimodal"),
    "4845c99793cd": ("pre-norm with experts that return router scores", "gpt_oss"),
    **dict.fromkeys(("eac6749a74f4", "086c561c08b8"), ("pre-norm, attention or a gated delta net", "qwen3_5")),
    **dict.fromkeys(
        ("7b57bce965dd", "4742bb7e8ce0"),
        ("pre-norm, attention or a gated delta net, experts", "qwen3_next, qwen3_5_moe"),
    ),
    "e99d19dbb55f": ("pre-norm, a gated delta net", "olmo_hybrid, from 5.15"),
    "f69918c01ce5": ("pre-norm, attention or a short convolution", "lfm2, lfm2_moe, from 5.23"),
}


@dataclass(frozen=True)
class WholeSequences:
    """Models whose sequences must be neither packed nor sharded: tokens may be mixed elsewhere than in attention."""

    def find(self, module: ModuleView) -> Iterator[ClassFact]:
        reason = self._reason(module)
        for name in module.classes:
            if name.endswith("ForConditionalGeneration"):
                yield ClassFact(name, "_opslot_keeps_sequences", "it is not only a language model")
            elif reason and name in module.models:
                yield ClassFact(name, "_opslot_keeps_sequences", reason)

    @staticmethod
    def _reason(module: ModuleView) -> str:
        layers = [name for name, _ in module.methods() if name.endswith("DecoderLayer")]
        unknown = [name for name in layers if module.fingerprint(f"{name}.forward") not in DECODER_LAYERS]
        if unknown:
            return f"{unknown[0]} is not one of the reviewed decoder layers"
        if not layers:
            return "it has no decoder layers"
        return other_masks(module) or masks_without_positions(module)


FORMS = (Attention(), WholeSequences())
