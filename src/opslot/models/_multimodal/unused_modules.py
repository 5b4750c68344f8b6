"""Modules that no rank has run on an input in a step, whose gradients are then zeros: those of dummy inputs of towers,
and those that modules of lists, such as experts, get on ranks that skip them.

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
from opslot.models._multimodal.conditional import skipped_modules
from opslot.models._multimodal.modalities import Towers, towers_of
from opslot.models._multimodal.parts import parts_of


def drop_gradients_of_unused_modules(model: Any) -> None:
    """Remove the gradients of towers, projections and modules of lists that no rank has run in a step.

    The trainer calls it. In a training loop of your own, call it on every rank after the last backward pass of a step,
    before gradients are clipped. Does nothing for a model without such modules, and in a single process.
    """
    towers, stacks = towers_of(model), skipped_modules(model)
    if towers is None and not stacks:
        return
    kinds = [] if towers is None else _used_kinds(towers)
    # Calls of a module that is compiled itself are not noted: it counts as used.
    parts = {
        part: part in stack.used or part._compiled_call_impl is not None for stack in stacks for part in stack.parts
    }
    for stack in stacks:
        stack.used.clear()
    counts = sum_over_ranks(*kinds, *map(float, parts.values()))
    unused = [part for part, count in zip(parts, counts[len(kinds) :], strict=True) if not count]
    found = [p for part in unused for p in part.parameters() if p.requires_grad]
    if towers is not None and not (towers.are_known and all(counts[: len(kinds)])):
        found += _parameters_of_towers(model, towers)
    candidates = list(dict.fromkeys(found))
    if not candidates:
        return
    counts = sum_over_ranks(*torch.stack([_has_gradient(p) for p in candidates]).tolist())
    for parameter, count in zip(candidates, counts, strict=True):
        if not count:
            parameter.grad = None


def _used_kinds(towers: Towers) -> list[float]:
    """For each tower, whether this rank has run it on an input since the last call of this function, as 0 or 1."""
    # Images and videos have one tower.
    kinds: dict[bool, float] = {}
    for name in towers.dummies:
        of_audio = name == AUDIO_METHOD
        kinds[of_audio] = max(kinds.get(of_audio, 0.0), float(name in towers.used))
    towers.used.clear()
    return list(kinds.values())


def _parameters_of_towers(model: Any, towers: Towers) -> list[nn.Parameter]:
    if towers.parameters is None:
        inside = {name for part, names in parts_of(model).items() if part != "language_model" for name in names}
        towers.parameters = [p for name, p in model.named_parameters() if name in inside and p.requires_grad]
    return towers.parameters


def _has_gradient(parameter: nn.Parameter) -> torch.Tensor:
    """Whether the local part of a gradient has another number than zero, as 0 or 1 []."""
    if parameter.grad is None:
        return torch.zeros((), device=parameter.device)
    return local_tensor(parameter.grad).any().float()
