"""LoRA adapters on stacked expert weights: kernels get the weights with the adapters added.

PEFT adds them with a parametrization, which FSDP2 and expert parallelism cannot shard. Here a wrapper around the kernel
computes W + scaling * B A of this rank's experts, so every kernel of experts serves. Their memory, and that of their
gradients, is that of the experts of one layer; without activation checkpointing the former is kept for each layer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from opslot.checkpoint.adapters import ADAPTER, adapter_layers
from opslot.distributed import get_parallel_state
from opslot.slots import Binding


def with_expert_adapters(binding: Binding, root: nn.Module) -> Binding:
    """The binding with the adapters of stacked experts added to the weights of each kernel."""
    by_module: dict[int, list[Any]] = {}
    for _, layer in adapter_layers(root):
        if hasattr(layer, "parameter_name"):
            by_module.setdefault(id(layer.get_base_layer()), []).append(layer)
    for slot in binding.slots:
        layers = by_module.get(id(root.get_submodule(slot.path)))
        if layers and slot.resolution.op_name == "moe_experts":
            for layer in layers:
                layer.__class__ = _in_kernel(type(layer))
            wrapper, path = _ExpertAdapters(tuple(layers)), slot.path
            binding = binding.with_wrapper(wrapper, lambda slot, path=path: slot.path == path)  # type: ignore[misc]
    return binding


_IN_KERNEL: dict[type, type] = {}


def _in_kernel(cls: type) -> type:
    """PEFT's layer of an expert weight, without its parametrization."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.base_layer(*args, **kwargs)

    if cls in _IN_KERNEL.values():
        return cls
    if cls not in _IN_KERNEL:
        _IN_KERNEL[cls] = type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})
    return _IN_KERNEL[cls]


@dataclass(frozen=True)
class _ExpertAdapters:
    """Wraps a kernel of experts so that it gets the weights with the adapters added.

    Attributes:
        layers: PEFT's layers, each of one weight.
    """

    layers: tuple[Any, ...]
    name: str = "adapters"

    def wrap(self, module: Any, kernel: Callable[..., Any] | None, reference: Callable[..., Any]) -> Callable[..., Any]:
        return _WithAdapters(kernel or reference, list(inspect.signature(reference).parameters), self.layers)


class _WithAdapters:
    """A kernel of experts that is called with the weights without adapters."""

    def __init__(self, kernel: Callable[..., Any], names: list[str], layers: tuple[Any, ...]) -> None:
        self.kernel = kernel
        self._layers = {names.index(layer.parameter_name): layer for layer in layers}

    def __call__(self, *arguments: Any) -> Tensor:
        values = list(arguments)
        for position, layer in self._layers.items():
            if not (layer.disable_adapters or layer.merged):
                values[position] = _adapted(values[position], layer)
        return self.kernel(*values)

    def __repr__(self) -> str:
        return f"<with adapters {self.kernel!r}>"


def _adapted(weight: Tensor, layer: Any) -> Tensor:
    """The weight of this rank's experts [E, ...] plus their adapters'."""
    own = weight.to_local() if isinstance(weight, DTensor) else weight
    first = get_parallel_state().ep_rank * len(own) if isinstance(weight, DTensor) else 0
    a, b = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
    # [E, r, inputs] and [E, outputs, r], as PEFT stores them.
    a = a.view(layer.num_experts, -1, a.shape[-1])[first : first + len(own)].to(own.dtype)
    b = b.view(b.shape[0], -1, layer.num_experts).permute(2, 0, 1)[first : first + len(own)].to(own.dtype)
    left, right = (b, a) if layer._did_swap_in_out_features else (a.mT, b.mT)
    return torch.baddbmm(own, left, right, alpha=layer.scaling[ADAPTER])
