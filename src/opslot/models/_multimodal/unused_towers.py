"""Towers that no rank has run on an input in a step, whose gradients are then the zeros of dummy inputs.

In a single process they have no gradients, and an optimizer leaves the parameters and their state as they are. With
zeros, AdamW would decay the weights and move them by their momentum: those of an audio encoder in each step of a run on
images.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from opslot.distributed import sum_over_ranks
from opslot.distributed.dtensors import local_tensor
from opslot.models._multimodal.audio import METHOD as AUDIO_METHOD
from opslot.models._multimodal.modalities import TowerCalls, tower_calls
from opslot.models._multimodal.parts import parts_of


def drop_gradients_of_unused_towers(model: Any) -> None:
    """Remove the gradients of towers and projections that are zero on all ranks, after the last backward pass of a
    step; every rank calls it."""
    calls = tower_calls(model)
    if calls is None or _all_used(calls):
        return
    if calls.parameters is None:
        towers = {name for part, names in parts_of(model).items() if part != "language_model" for name in names}
        calls.parameters = [p for name, p in model.named_parameters() if name in towers and p.requires_grad]
    if not calls.parameters:
        return
    counts = sum_over_ranks(*torch.stack([_has_gradient(p) for p in calls.parameters]).tolist())
    for parameter, count in zip(calls.parameters, counts, strict=True):
        if not count:
            parameter.grad = None


def _all_used(calls: TowerCalls) -> bool:
    """Whether each tower was run on an input, by any rank, since the last call of this function."""
    # Images and videos have one tower.
    kinds: dict[bool, float] = {}
    for name in calls.names:
        of_audio = name == AUDIO_METHOD
        kinds[of_audio] = max(kinds.get(of_audio, 0.0), float(name in calls.used))
    calls.used.clear()
    return calls.are_known and all(sum_over_ranks(*kinds.values()))


def _has_gradient(parameter: nn.Parameter) -> torch.Tensor:
    """Whether the local part of a gradient has another number than zero, as 0 or 1 []."""
    if parameter.grad is None:
        return torch.zeros((), device=parameter.device)
    return local_tensor(parameter.grad).any().float()
