"""Models whose loss ignores `num_items_in_batch` and `shift_labels`: it is the mean over the labels of one call."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from typing import Any

import torch
from torch import Tensor
from transformers.loss.loss_utils import LOSS_MAPPING

from opslot.models._conditional import transformers_model

_HEADS = ("ForCausalLM", "ForConditionalGeneration", "ForMaskedLM", "ForTextToText", "LMHeadModel", "MTModel")
_IGNORED = -100
_LOSSES = ("CrossEntropyLoss", "cross_entropy", "loss_fct")


def call_with_share_of_loss(model: Any, inputs: dict[str, Any], num_items_in_batch: int) -> Any:
    """Outputs of a Transformers model, which may be in a wrapper, whose loss is the share of this call in the mean over
    `num_items_in_batch` labels."""
    items = max(1, num_items_in_batch)
    labels: Tensor = inputs["labels"]
    # With a cache, Transformers does not look for packed documents in position_ids.
    outputs = model(**inputs, use_cache=False, num_items_in_batch=torch.full((), items, device=labels.device))
    if averages_its_own_labels(transformers_model(model)):
        own = int((labels[:, 1:] != _IGNORED).sum())
        # The mean over no labels is NaN.
        outputs.loss = outputs.loss * (own / items) if own else outputs.logits.sum() * 0
    return outputs


def averages_its_own_labels(model: Any) -> bool:
    """Whether a Transformers model with a language-model head computes its loss from its labels alone.

    Losses of its micro batches, and of ranks, are then not shares of one mean.
    """
    classes = (cls for cls in type(model).__mro__ if cls.__name__.endswith(_HEADS) and "forward" in vars(cls))
    found = next((cls for cls in classes if not cls.__name__.startswith("FSDP")), None)
    return found is not None and _averages(found)


def keeps_labels_in_place(model: Any) -> bool:
    """Whether Transformers' loss of a model, such as a masked language model, takes no labels that are shifted."""
    loss = LOSS_MAPPING.get(getattr(model, "loss_type", None))
    return loss is not None and "shift_labels" not in inspect.signature(loss).parameters


@functools.cache
def _averages(cls: Any) -> bool:
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(cls.forward)))
    except (OSError, TypeError):
        return False
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    names = {id(call): ast.unparse(call.func) for call in calls}
    losses = [call for call in calls if names[id(call)] == "self.loss_function"]
    if any(k.arg in (None, "num_items_in_batch") for call in losses for k in call.keywords):
        return False
    if "num_items_in_batch" in source:
        return False
    return bool(losses) or any(name.endswith(_LOSSES) for name in names.values())
