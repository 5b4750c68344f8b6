"""Values of device tensors that are known on the host, because the tensors were copied from there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

# The host tensor that each device tensor was copied from.
_sources: Any = WeakIdKeyDictionary()
_LARGEST_STEP = "opslot_largest_step"


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
    if source.dim() == 1 and len(source) > 1 and not source.is_floating_point():
        # torch.compile guards attributes of a graph's inputs, and cannot look the source up.
        setattr(copy, _LARGEST_STEP, int(source.diff().max()))


def host_values(tensor: Tensor) -> Tensor:
    """The values of an integer tensor without a synchronization, if they came from the host; else `tensor`."""
    return _sources.get(tensor, tensor)


def largest_step(tensor: Tensor) -> int | None:
    """The largest difference of neighbours of a tensor with one dim, if its values came from the host; else None.

    In compiled code, only of an input of the graph.
    """
    return getattr(tensor, _LARGEST_STEP, None)
