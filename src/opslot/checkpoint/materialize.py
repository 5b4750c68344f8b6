"""Allocating parameters and buffers on meta."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def materialize(model: nn.Module, device: torch.device | str | None, skip: Collection[int] = ()) -> None:
    """Allocate every meta tensor of `model` on `device`; values are undefined.

    Args:
        model: changed in place; tied parameters stay tied, sharded ones sharded.
        device: None for the CPU, or the mesh's device for a DTensor.
        skip: ids of parameters that stay on meta.
    """
    tied: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                tied[id(parameter)].append((module, key))

    def give_memory(tensor: Tensor) -> Tensor:
        if not tensor.is_meta or id(tensor) in skip:
            return tensor
        home = tensor.device_mesh.device_type if isinstance(tensor, DTensor) else "cpu"
        return torch.empty_like(tensor, device=device or home)

    # FSDP overrides it to follow its parameters.
    model._apply(give_memory)
    for places in tied.values():
        owner, owner_key = places[0]
        for module, key in places[1:]:
            module._parameters[key] = owner._parameters[owner_key]
