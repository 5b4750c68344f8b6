"""Allocating parameters and buffers on meta."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def materialize(
    model: nn.Module, device: torch.device | str | None, dtype: torch.dtype | None, skip: Collection[int] = ()
) -> None:
    """Allocate every meta tensor of `model` on `device`, and cast every floating parameter to `dtype`; values are
    undefined.

    Args:
        model: changed in place; tied parameters stay tied, sharded ones sharded.
        device: None for the CPU, or the mesh's device for a DTensor.
        dtype: None leaves the parameters' own.
        skip: ids of parameters that stay on meta.
    """
    tied: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                tied[id(parameter)].append((module, key))

    def give_memory(tensor: Tensor) -> Tensor:
        if id(tensor) in skip:
            return tensor
        cast = isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
        wanted = dtype if cast and dtype else tensor.dtype
        if tensor.is_meta:
            home = tensor.device_mesh.device_type if isinstance(tensor, DTensor) else "cpu"
            return torch.empty_like(tensor, device=device or home, dtype=wanted)
        return tensor if tensor.dtype == wanted else torch.empty_like(tensor, dtype=wanted)

    # FSDP overrides it to follow its parameters.
    model._apply(give_memory)
    for places in tied.values():
        owner, owner_key = places[0]
        for module, key in places[1:]:
            module._parameters[key] = owner._parameters[owner_key]
