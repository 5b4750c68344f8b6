"""Values of device tensors that are known on the host, because the tensors were copied from there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

# The host tensor that each device tensor was copied from.
_sources: Any = WeakIdKeyDictionary()


def device_copy(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy that later work on the device waits for, and the host does not.

    Inside a `TorchFunctionMode` too, which may keep host tensors where they are (`keep_inputs_on_host`).
    """
    with torch._C.DisableTorchFunction():
        from_host = device.type == "cuda" and tensor.device.type == "cpu"
        # Expanded tensors cannot be pinned.
        return (tensor.contiguous().pin_memory() if from_host else tensor).to(device, non_blocking=True)


def remember_source(copy: Tensor, source: Tensor) -> None:
    """Record that `copy` has the values of `source`, a tensor of the host."""
    _sources[copy] = source


def host_values(tensor: Tensor) -> Tensor:
    """The values of an integer tensor without a synchronization, if they came from the host; else `tensor`."""
    return _sources.get(tensor, tensor)
