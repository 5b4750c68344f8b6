"""Frozen experts with stacked weights in NF4: a wrapper dequantizes them for each call of their kernel.

Autograd keeps the quantized weights, so at any time the dequantized ones of one layer are in memory. The backward pass
dequantizes them again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from opslot._base.errors import ConfigError
from opslot.ops.linear.nf4 import dequantize
from opslot.slots import Binding
from opslot.slots.binding import wrapper_of

QUANTIZATION = "nf4 (bitsandbytes)"
# Its kernels count in int32.
_MOST_VALUES = 2**31 - 1


def quantize_experts(module: nn.Module) -> None:
    """Let the stacked weights of `module`, which are on meta, be quantized as they are loaded."""
    names = [name for name, parameter in module.named_parameters(recurse=False) if parameter.ndim == 3]
    module.__dict__["load_weights"] = {name: functools.partial(_load, module, name) for name in names}
    module.__dict__["quantized_experts"] = QUANTIZATION
    module.__dict__["stacked_shapes"] = {name: tuple(getattr(module, name).shape) for name in names}
    module.register_state_dict_post_hook(functools.partial(_leave_out, names))
    for name in names:
        getattr(module, name).requires_grad_(False)


def _load(module: nn.Module, name: str, weight: Tensor, device: torch.device | str | None) -> None:
    import bitsandbytes

    if weight.numel() > _MOST_VALUES:
        raise ConfigError(
            f"{name} of {type(module).__name__} has more values than bitsandbytes quantizes",
            found=f"{weight.numel():,} of at most {_MOST_VALUES:,}",
            hint="set train.ep_size so that each rank holds fewer experts",
        )
    parameter = bitsandbytes.nn.Params4bit(weight, requires_grad=False, quant_type="nf4")
    module._parameters[name] = parameter.to(device or "cpu")


def _leave_out(names: list[str], module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """State dict hook: quantized weights are read from the checkpoint of the base model."""
    for name in names:
        if not getattr(module, name).is_meta:
            state.pop(f"{prefix}{name}", None)


def with_quantized_experts(binding: Binding, root: nn.Module) -> Binding:
    """The binding with the weights of quantized experts dequantized for each call of their kernel."""
    quantized = {path for path, module in root.named_modules() if "quantized_experts" in module.__dict__}
    wrapper = wrapper_of("nf4 weights", _Dequantized)
    return binding.with_wrappers(
        lambda slot: wrapper if slot.op.name == "moe_experts" and slot.path in quantized else None
    )


@dataclass(eq=False)
class _Dequantized:
    """A kernel of experts that gets dequantized weights."""

    kernel: Callable[..., Any]

    @torch.compiler.disable
    def __call__(self, *arguments: Any) -> Tensor:
        values = [dequantize(value) if hasattr(value, "quant_state") else value for value in arguments]
        by_storage = {
            value.untyped_storage().data_ptr(): packed
            for value, packed in zip(values, arguments, strict=True)
            if value is not packed
        }

        # The hooks around this call, such as those of activation checkpointing, take the other tensors.
        outer_pack, outer_unpack = torch._C._autograd._top_saved_tensors_default_hooks(False) or (_same, _same)

        def pack(tensor: Tensor) -> Any:
            packed = by_storage.get(tensor.untyped_storage().data_ptr())
            return outer_pack(tensor) if packed is None else _Saved(packed, tensor)

        def unpack(saved: Any) -> Tensor:
            return saved.tensor() if isinstance(saved, _Saved) else outer_unpack(saved)

        with saved_tensors_hooks(pack, unpack):
            return self.kernel(*values)


def _same(value: Any) -> Any:
    return value


class _Saved:
    """A view of dequantized weights, without them."""

    def __init__(self, packed: Any, view: Tensor) -> None:
        self._packed = packed
        self._place = view.shape, view.stride(), view.storage_offset()

    def tensor(self) -> Tensor:
        return dequantize(self._packed).as_strided(*self._place)
