"""Models whose loss ignores `num_items_in_batch` and `shift_labels`: it is the mean over the labels of one call."""

from __future__ import annotations

import ast
import contextlib
import contextvars
import functools
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers.loss.loss_utils import LOSS_MAPPING

from opslot._base.labels import IGNORE_INDEX, shifted_labels
from opslot._base.source import forward_source
from opslot.models._multimodal.conditional import transformers_model

_HEADS = ("ForCausalLM", "ForConditionalGeneration", "ForMaskedLM", "ForTextToText", "LMHeadModel", "MTModel")
# Whether `call_with_share_of_loss` made the call that runs.
_IS_SHARE = contextvars.ContextVar("is_share", default=False)
_LOSSES = ("CrossEntropyLoss", "cross_entropy", "loss_fct")


def call_with_share_of_loss(model: Any, inputs: dict[str, Any], num_items_in_batch: int) -> Any:
    """Outputs of a Transformers model, which may be in a wrapper, whose loss is the share of this call in the mean over
    `num_items_in_batch` labels.

    `labels` are aligned with `input_ids`. A causal model whose loss does not shift them gets them shifted.
    """
    items = max(1, num_items_in_batch)
    labels: Tensor = inputs["labels"]
    whole = transformers_model(model)
    own = None
    if averages_its_own_labels(whole):
        in_place = compares_labels_in_place(whole)
        if in_place and not _has_aligned_outputs(whole):
            labels = shifted_labels(labels).contiguous()
        own = int(((labels if in_place else labels[:, 1:]) != IGNORE_INDEX).sum())
        if not own:
            # The mean over no labels is NaN, also in gradients.
            labels = labels.clone()
            labels[:, -1] = 0
        inputs = {**inputs, "labels": labels}
    # With a cache, Transformers does not look for packed documents in position_ids.
    added = {"use_cache": False, "num_items_in_batch": torch.full((), items, device=labels.device)}
    if own is not None:
        parameters = inspect.signature(type(whole).forward).parameters.values()
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        added = {name: value for name, value in added.items() if takes_any or name in {p.name for p in parameters}}
    inputs = {**inputs, **added}
    with _share_of_z_loss(whole, inputs, items):
        token = _IS_SHARE.set(True)
        try:
            outputs = model(**inputs)
        finally:
            _IS_SHARE.reset(token)
    if own is not None:
        outputs.loss = outputs.loss * (own / items)
    return outputs


def is_share_of_loss() -> bool:
    """Whether the call that runs was made by `call_with_share_of_loss`, also of a model that takes no
    `num_items_in_batch`."""
    return _IS_SHARE.get()


@contextlib.contextmanager
def _share_of_z_loss(model: Any, inputs: dict[str, Any], items: int) -> Iterator[None]:
    """Context in which Bamba's z-loss, a mean over the positions of one call, has the weight of the call's labels."""
    coefficient = getattr(model, "z_loss_coefficient", None)
    if not coefficient:
        yield
        return
    shifted = inputs.get("shift_labels")
    counted = inputs["labels"][:, 1:] if shifted is None else shifted
    model.z_loss_coefficient = coefficient * int((counted != IGNORE_INDEX).sum()) / items
    try:
        yield
    finally:
        model.z_loss_coefficient = coefficient


def averages_its_own_labels(model: Any) -> bool:
    """Whether a Transformers model with a language-model head computes its loss from its labels alone.

    Losses of its micro batches, and of ranks, are then not shares of one mean.
    """
    found = _class_with_loss(model)
    return found is not None and _averages(found)


def keeps_labels_in_place(model: Any) -> bool:
    """Whether Transformers' loss of a model, such as a masked language model, takes no labels that are shifted."""
    loss = LOSS_MAPPING.get(getattr(model, "loss_type", None))
    return loss is not None and "shift_labels" not in inspect.signature(loss).parameters


def compares_labels_in_place(model: Any) -> bool:
    """Whether a model that `averages_its_own_labels` predicts the label of each token from that token's own output."""
    found = _class_with_loss(model)
    if found is not None and "self.loss_function" in forward_source(found):
        return keeps_labels_in_place(model)
    return found is not None and not _slices_labels(found)


def why_not_causal(model: Any) -> str | None:
    """Why tokens are not predicted from earlier ones only, where `labels` are the tokens of `input_ids`; else None."""
    if model.config.is_encoder_decoder:
        return "its encoder reads the tokens that its decoder predicts"
    bidirectional = (type(m).__name__ for m in model.modules() if getattr(m, "is_decoder", None) is False)
    if getattr(model.config, "is_decoder", None) is False and (name := next(bidirectional, None)):
        return f"{name} attends to later tokens, since is_decoder is false in its config"
    head = _class_with_loss(model)
    if head is not None and "MaskedLM" in head.__name__:
        return f"{head.__name__} predicts masked tokens, from earlier and later ones"
    # "vision" is for images alone.
    text = model.config.get_text_config()
    if getattr(text, "use_bidirectional_attention", None) in (True, "all"):
        return f"it attends to later tokens, since use_bidirectional_attention is set in its {text.model_type} config"
    return None


def _has_aligned_outputs(model: Any) -> bool:
    """Whether the output of a token is a prediction of its own label: of a masked language model, or of a decoder whose
    inputs the model shifts."""
    cls = _class_with_loss(model)
    return (cls is not None and "MaskedLM" in cls.__name__) or bool(model.config.is_encoder_decoder)


def _class_with_loss(model: Any) -> Any:
    """The class whose forward computes the loss of a language model's head; None where there is none."""
    classes = (cls for cls in type(model).__mro__ if cls.__name__.endswith(_HEADS) and "forward" in vars(cls))
    return next((cls for cls in classes if not cls.__name__.startswith("FSDP")), None)


@functools.cache
def _slices_labels(cls: Any) -> bool:
    sliced = (node.value for node in ast.walk(ast.parse(forward_source(cls))) if isinstance(node, ast.Subscript))
    return any(ast.unparse(value) in ("labels", "shift_labels") for value in sliced)


@functools.cache
def _averages(cls: Any) -> bool:
    source = forward_source(cls)
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    names = {id(call): ast.unparse(call.func) for call in calls}
    losses = [call for call in calls if names[id(call)] == "self.loss_function"]
    if any(k.arg in (None, "num_items_in_batch") for call in losses for k in call.keywords):
        return False
    if "num_items_in_batch" in source:
        return False
    return bool(losses) or any(name.endswith(_LOSSES) for name in names.values())
