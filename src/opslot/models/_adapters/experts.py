"""LoRA adapters on stacked expert weights, computed by the kernel of experts.

PEFT adds them to the weights with a parametrization, which FSDP2 and expert parallelism cannot shard, and which takes a
copy and a gradient of the size of the weights. Here a wrapper gives the kernel this rank's factors, and the kernel
computes them as GEMMs beside those of the weights. A kernel without that gets the weights with the adapters added; so
does Transformers' own loop.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from opslot.checkpoint.adapters import ADAPTER, adapter_layers
from opslot.distributed import ExpertParallel, get_parallel_state
from opslot.distributed.dtensors import local_tensor
from opslot.models._adapters.linear import set_forward
from opslot.slots import Binding, SlotBinding, Wrapper
from opslot.slots.protocol import is_adapted


def mark_adapted_experts(model: nn.Module) -> None:
    """Mark experts with adapters, which decides what `auto` selects for them; call it before kernels are selected."""
    for layer in _expert_layers(model):
        is_adapted.set(layer.get_base_layer(), True)


def _expert_layers(model: nn.Module) -> Iterator[Any]:
    yield from (layer for _, layer in adapter_layers(model) if hasattr(layer, "parameter_name"))


def with_expert_adapters(binding: Binding, root: nn.Module) -> Binding:
    """The binding with the adapters of stacked experts added to the weights of each kernel."""
    by_module: dict[nn.Module, list[Any]] = {}
    for layer in _expert_layers(root):
        by_module.setdefault(layer.get_base_layer(), []).append(layer)

    def adapters(slot: SlotBinding) -> Wrapper | None:
        layers = by_module.get(root.get_submodule(slot.path), []) if slot.op.name == "moe_experts" else []
        for layer in layers:
            set_forward(layer, _call_base)
        return Wrapper("adapters", partial(_add_adapters, tuple(layers))) if layers else None

    return binding.with_wrappers(adapters)


def _call_base(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Instead of the forward of PEFT's layer of an expert weight, which adds a parametrization."""
    return self.base_layer(*args, **kwargs)


def _add_adapters(
    layers: tuple[Any, ...], module: Any, kernel: Callable[..., Any] | None, reference: Callable[..., Any]
) -> Callable[..., Any]:
    """A kernel of experts that computes with the adapters of `layers`, PEFT's, each of one weight."""
    return _Adapted(kernel or reference, _with_adapters(kernel), inspect.signature(reference).parameters, layers)


def _with_adapters(kernel: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """`kernel` in its form that takes the factors of adapters; None if it has none."""
    if isinstance(kernel, ExpertParallel):
        inner = _with_adapters(kernel.kernel)
        return None if inner is None else kernel.around(inner)
    return getattr(getattr(kernel, "kernel", None), "with_adapters", None)


class _Adapted:
    """A kernel of experts with adapters, called with the arguments of the op's contract.

    Args:
        kernel: gets the weights with the adapters added, if `adapted` is None: e.g. Transformers' own loop.
        adapted: the kernel in its form that takes the factors, which it computes as separate GEMMs.
        parameters: of the op's contract.
        layers: PEFT's, each of one weight.
    """

    def __init__(
        self,
        kernel: Callable[..., Any],
        adapted: Callable[..., Any] | None,
        parameters: Mapping[str, inspect.Parameter],
        layers: tuple[Any, ...],
    ) -> None:
        self.kernel, self.adapted = kernel, adapted
        by_name = {layer.parameter_name: layer for layer in layers}
        names = list(parameters)
        # One for each weight, which come after the hidden states and before the indices.
        self._layers = [by_name.get(name) for name in names[1 : names.index("top_k_index")]]
        self._defaults = [parameter.default for parameter in parameters.values()]

    def __call__(self, *arguments: Any) -> Tensor:
        factors = [
            None if layer is None or layer.disable_adapters or layer.merged else _factors(weight, layer)
            for weight, layer in zip(arguments[1:], self._layers)
        ]
        if not any(factors):
            return self.kernel(*arguments)
        if self.adapted is not None:
            each = [factor for pair in factors for factor in pair or (None, None)]
            return self.adapted(*arguments, *self._defaults[len(arguments) :], *each)
        given = list(arguments)
        for number, pair in enumerate(factors, 1):
            if pair is not None:
                own, (left, right) = local_tensor(given[number]), pair
                given[number] = torch.baddbmm(own, left.to(own.dtype), right.to(own.dtype))
        return self.kernel(*given)

    def __repr__(self) -> str:
        return f"<with adapters {self.kernel!r}>"


def _factors(weight: Tensor, layer: Any) -> tuple[Tensor, Tensor]:
    """The adapter of this rank's experts [E, ...] as two factors, whose product has the layout of the weight."""
    held = len(local_tensor(weight))
    # A quantized weight is this rank's part, and not a DTensor.
    first = get_parallel_state().ep_rank * held if held < layer.num_experts else 0
    a, b = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
    # [E, r, inputs] and [E, outputs, r], as PEFT stores them.
    a = a.view(layer.num_experts, -1, a.shape[-1])[first : first + held]
    b = b.view(b.shape[0], -1, layer.num_experts).permute(2, 0, 1)[first : first + held] * layer.scaling[ADAPTER]
    return (b, a) if layer._did_swap_in_out_features else (a.mT, b.mT)
