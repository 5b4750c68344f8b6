"""Moving a model and its optimizer state to host memory and back, e.g. while an inference engine uses the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from opslot._base.errors import ConfigError
from opslot.distributed.mixed_precision import release_copies

# Of what is offloaded, where it was: a model's device, and an optimizer's state tensors by parameter and key.
_MODELS: WeakKeyDictionary[nn.Module, torch.device] = WeakKeyDictionary()
_OPTIMIZERS: WeakKeyDictionary[torch.optim.Optimizer, dict[tuple[Tensor, str], torch.device]] = WeakKeyDictionary()


def offload(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Move parameters, gradients and buffers of `model` and the state of `optimizer` to host memory.

    `reload` moves them back; until then the model cannot run. Sharded parameters stay sharded. What is already
    offloaded stays as it is.
    """
    parameter = next(model.parameters(), None)
    if model not in _MODELS and parameter is not None:
        _MODELS[model] = parameter.device
        release_copies(model)
        model.to("cpu")
    if optimizer is not None and optimizer not in _OPTIMIZERS:
        _OPTIMIZERS[optimizer] = {(p, key): value.device for p, key, value in _state_of(optimizer)}
        for p, key, value in _state_of(optimizer):
            optimizer.state[p][key] = value.to("cpu")
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def reload(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Move what `offload` moved back to where it was.

    Raises:
        ConfigError: the model or the optimizer is not offloaded.
    """
    for name, is_there in (("model", model in _MODELS), ("optimizer", optimizer is None or optimizer in _OPTIMIZERS)):
        if not is_there:
            raise ConfigError(f"the {name} is not offloaded", hint="call opslot.offload(model, optimizer) first")
    model.to(_MODELS.pop(model))
    if optimizer is not None:
        devices = _OPTIMIZERS.pop(optimizer)
        for p, key, value in _state_of(optimizer):
            optimizer.state[p][key] = value.to(devices[p, key])


def _state_of(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Any, str, Tensor]]:
    for parameter, state in optimizer.state.items():
        for key, value in list(state.items()):
            if isinstance(value, Tensor):
                yield parameter, key, value
