"""LoRA adapters on linear layers, computed as one function with the layer.

PEFT's forward adds an adapter to the output of its layer with elementwise launches, each of which reads and writes
tensors of the size of the output. What it computes other than plain LoRA keeps its forward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from opslot._base.wrapper_tensors import wrapper_class
from opslot.checkpoint.adapters import adapter_layers
from opslot.ops._common.hooks import has_hooks
from opslot.ops.linear import low_rank
from opslot.slots import OpsImplementationConfig

_CLASSES = {"peft.tuners.lora.layer.Linear", "peft.tuners.lora.bnb.Linear4bit"}


def fuse_linear_adapters(model: nn.Module, config: OpsImplementationConfig) -> None:
    """Compute the adapters of linear layers with their layers, unless `config` sets linear to eager."""
    if config.linear_implementation == "eager":
        return
    for _, layer in adapter_layers(model):
        if f"{type(layer).__module__}.{type(layer).__name__}" in _CLASSES:
            set_forward(layer, _forward)


def set_forward(layer: Any, forward: Callable[..., Any]) -> None:
    """Give one module another forward, whose first argument is the one of its class."""
    layer.forward = functools.partial(forward, type(layer).forward, layer)


def _forward(original: Callable[..., Any], self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    adapter = None if args or kwargs else _adapter(self, x)
    if adapter is None:
        return original(self, x, *args, **kwargs)
    layer = self.base_layer
    return low_rank.linear(x, layer.weight, layer.bias, adapter)


def _adapter(self: Any, x: Tensor) -> low_rank.Adapter | None:
    """The adapter of a layer of PEFT if it computes plain LoRA and `low_rank.linear` serves it, else None."""
    if self.disable_adapters or self.merged:
        return None
    active = [name for name in self.active_adapters if name in self.lora_A]
    if len(active) != 1:
        return None
    (name,) = active
    layer, down, up = self.base_layer, self.lora_A[name], self.lora_B[name]
    dropout = self.lora_dropout[name]
    if name in self.lora_variant or not (isinstance(dropout, nn.Identity) or not self.training):
        return None
    if not (_is_plain(down) and _is_plain(up) and up.bias is None and not has_hooks(layer)):
        return None
    state = getattr(layer.weight, "quant_state", None)
    if state is None and (not _is_plain(layer) or layer.weight.requires_grad or wrapper_class(layer.weight)):
        return None
    if state is not None and low_rank.is_inference(x):
        return None
    bias = layer.bias
    if bias is not None and (bias.requires_grad or bias.dtype != x.dtype):
        return None
    if not low_rank.serves(x, layer.weight if state is None else state, down.weight, up.weight):
        return None
    return low_rank.Adapter(down.weight, up.weight, self.scaling[name])


def _is_plain(layer: Any) -> bool:
    """Whether a call of `layer` is that of nn.Linear."""
    return type(layer).forward is nn.Linear.forward and "forward" not in layer.__dict__ and not has_hooks(layer)
