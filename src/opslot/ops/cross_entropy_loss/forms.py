"""Transformers code that cross_entropy_loss replaces, from the head's input to the loss. Does not import torch."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import partial

from opslot.patchgen import PatchConfig, Slot
from opslot.patchgen.forms import Match, ModuleView, Skip
from opslot.patchgen.fused_loss import UnknownLossError, is_loss
from opslot.patchgen.losses import loss_region
from opslot.patchgen.upstream import find_nodes
from opslot.slots.protocol import LOSS_FUNCTION

OP = "cross_entropy_loss"
_CAUSAL = Slot(OP, "causal")
_CLASSIFICATION = Slot(OP, "sequence_classification")
_HEADS = "(For(CausalLM|ConditionalGeneration|MaskedLM)|MTModel)$|LMHead"
_CRITERIA = ("loss_fct", "criterion")
_LOG_PROBS = ("opslot.ops.cross_entropy_loss.log_probs", "returns_log_probs")
_LOSS_OF_CLASSIFIER = {
    "GenericForSequenceClassification": "ForSequenceClassificationLoss",
    "GenericForTokenClassification": "ForTokenClassification",
}
_LAYERS, _LOSSES = "transformers.modeling_layers", "transformers.loss.loss_utils"


def find_language_model_heads(module: ModuleView) -> Iterator[Match | Skip]:
    """Heads of language models: the statements from the logits to the loss."""
    for name, forward in module.methods():
        if "labels" in module.parameters(forward) and (
            re.search(_HEADS, name) or _predicts_tokens(module.function(forward))
        ):
            yield _head(module, name, forward)


def _predicts_tokens(forward: ast.FunctionDef) -> bool:
    """Whether a loss is computed over a vocabulary, in a class of any name."""
    calls = find_nodes(ast.Call, forward)
    return any(is_loss(call, _CRITERIA) and "vocab_size" in ast.unparse(call) for call in calls)


def _head(module: ModuleView, name: str, forward: str) -> Match | Skip:
    function, init = module.function(forward), module.upstream.find(f"{name}.__init__")
    assert init is None or isinstance(init, ast.FunctionDef)
    try:
        region = loss_region(function, init, name, module.classes)
    except UnknownLossError as reason:
        # The forward raises for return_log_probs, instead of ignoring the argument.
        return Skip(name, OP, str(reason), lambda patch: patch.decorate(forward, *_LOG_PROBS))

    def write(patch: PatchConfig) -> None:
        patch.slot_loss(forward, _CAUSAL)
        patch.set_attribute(name, LOSS_FUNCTION, region.loss_function)
        patch.decorate(forward, *_LOG_PROBS)
        patch.depends_on(_LOSSES, "ForCausalLMLoss", "fixed_cross_entropy")

    return Match(name, OP, _CAUSAL.variant, write)


def find_classifiers(module: ModuleView) -> Iterator[Match]:
    """Heads with the forward of one of Transformers' generic classifiers: only the loss."""
    for base, loss in _LOSS_OF_CLASSIFIER.items():
        for name in module.classes:
            if base in module.bases(name) and not module.own_methods(name):
                yield Match(name, OP, _CLASSIFICATION.variant, partial(_write_classifier, name, base, loss))


def _write_classifier(name: str, base: str, loss: str, patch: PatchConfig) -> None:
    patch.inherit_method(f"{name}.forward", _LAYERS, f"{base}.forward")
    patch.slot_loss(f"{name}.forward", _CLASSIFICATION)
    patch.set_attribute(name, LOSS_FUNCTION, loss)
    patch.depends_on(_LOSSES, loss, "fixed_cross_entropy")


FORMS = (find_language_model_heads, find_classifiers)
