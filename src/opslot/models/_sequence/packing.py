"""Whether a model keeps packed documents apart."""

from __future__ import annotations

import copy
from typing import Any

import torch

from opslot._base.errors import ConfigError
from opslot.models._apply import apply, has_generated_classes
from opslot.models._multimodal.modalities import decoder_of
from opslot.models.discovery.engine import RECURRENCES
from opslot.slots.protocol import keeps_sequences, modules_by_document, walk_slots, why_by_document


def packing_problem(model: Any) -> str | None:
    """Why packed documents would see each other in `model`; None where they don't.

    Encoders compute each image, video and audio by itself.

    Args:
        model: with slots, or (OPSLOT_BACKEND=hf) of a class without, in which nothing runs once for each document.
    """
    model = decoder_of(model) or model
    if has_generated_classes(model):
        return keeps_sequences(model)
    with torch.device("meta"):
        probe = type(model)._from_config(copy.deepcopy(model.config))
    try:
        apply(probe, "eager", device="cpu")
    except ConfigError:
        return f"what {type(model).__name__} does with documents is unknown, since opslot finds no slots in its code"
    for _, module in modules_by_document(probe):
        return why_by_document(module)
    for slot in walk_slots(probe):
        if slot.op_name in RECURRENCES:
            return f"{type(slot.module).__name__} carries state from one document to the next"
    return keeps_sequences(probe)
