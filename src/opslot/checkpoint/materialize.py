"""Giving memory and first values to what a checkpoint will not fill."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from opslot._base.errors import CheckpointError
from opslot.checkpoint._report import listed
from opslot.checkpoint.model_tensors import plain_name
from opslot.checkpoint.placement import local_tensor


def materialize(model: nn.Module, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
    """Give every meta tensor of `model` memory on `device`, and every floating parameter `dtype`; values stay
    undefined.

    Args:
        model: changed in place; tied parameters stay tied, sharded ones sharded.
        device: None for the CPU, or the mesh's device for a DTensor.
        dtype: None leaves the parameters' own.
    """
    tied: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                tied[id(parameter)].append((module, key))

    def give_memory(tensor: Tensor) -> Tensor:
        cast = isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
        wanted = dtype if cast and dtype else tensor.dtype
        if tensor.is_meta:
            home = tensor.device_mesh.device_type if isinstance(tensor, DTensor) else "cpu"
            return torch.empty_like(tensor, device=device or home, dtype=wanted)
        return tensor if tensor.dtype == wanted else torch.empty_like(tensor, dtype=wanted)

    # The hook that FSDP and others override to follow their parameters to new memory.
    model._apply(give_memory)
    for places in tied.values():
        owner, owner_key = places[0]
        for module, key in places[1:]:
            module._parameters[key] = owner._parameters[owner_key]


def initialize(model: nn.Module, names: Collection[str], meta_buffers: Collection[str]) -> None:
    """Give `names`, which no checkpoint fills, and `meta_buffers`, which had no memory, the values that the
    model starts with.

    Uses Transformers' `_init_weights(module)`, else the module's `reset_parameters`. Other tensors of the
    same modules may change: call it before weights are written.

    Raises:
        CheckpointError: tensors that neither sets.
    """
    wanted = {*names, *meta_buffers}
    owners = [(module, own) for module, own in _owners(model) if wanted.intersection(own)]
    initialize_module = getattr(model, "_init_weights", None)
    with torch.no_grad():
        for _, own in owners:
            for name in wanted.intersection(own):
                _spoil(own[name])
        for module, _ in owners:
            if initialize_module is not None:
                initialize_module(module)
            elif (reset := getattr(module, "reset_parameters", None)) is not None:
                reset()
    left = [name for _, own in owners for name in wanted.intersection(own) if _is_spoiled(own[name])]
    if left:
        raise CheckpointError(
            f"tensors that the checkpoint lacks and the model cannot initialise by itself ({len(left)}):\n"
            f"{listed(sorted(left))}\n"
            "    to do: build the model on a real device, or give its modules a reset_parameters method"
        )


def _owners(model: nn.Module) -> Iterator[tuple[nn.Module, dict[str, Tensor]]]:
    """Every module with its own tensors, by their full plain names."""
    for prefix, module in model.named_modules():
        own = {**module._parameters, **module._buffers}
        yield module, {plain_name(f"{prefix}.{key}" if prefix else key): t for key, t in own.items() if t is not None}


def _marker(dtype: torch.dtype) -> float | int | None:
    """A value that no initialisation gives; None when the dtype has no room for one."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return None if dtype is torch.bool else torch.iinfo(dtype).min


def _spoil(tensor: Tensor) -> None:
    marker = _marker(tensor.dtype)
    if marker is not None:
        local_tensor(tensor).fill_(marker)


def _is_spoiled(tensor: Tensor) -> bool:
    marker, local = _marker(tensor.dtype), local_tensor(tensor)
    if marker is None or tensor.dtype is torch.uint8:
        return False
    return bool((torch.isnan(local) if marker != marker else local == marker).any())
