"""Values of device tensors that are known on the host, because the tensors were copied from there."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

# The host tensor that each device tensor was copied from.
_sources: Any = WeakIdKeyDictionary()


def remember_source(copy: Tensor, source: Tensor) -> None:
    """Record that `copy` has the values of `source`, a tensor of the host."""
    _sources[copy] = source


def host_values(tensor: Tensor) -> Tensor:
    """The values of an integer tensor without a synchronization, if they came from the host; else `tensor`."""
    return _sources.get(tensor, tensor)
