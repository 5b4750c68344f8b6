"""Frozen linear layers and experts with weights in NF4 (QLoRA, Dettmers et al. 2023), quantized by bitsandbytes.

A layer is made on meta and quantizes its weight as the checkpoint is read, so the model is never in memory unquantized.
Experts have stacked weights: a wrapper dequantizes them for each call of their kernel. Autograd keeps the quantized
weights, so at any time the dequantized ones of one layer are in memory. The backward pass dequantizes them again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from opslot._base.device import has_package
from opslot._base.errors import ConfigError
from opslot.checkpoint.model_tensors import unread_experts
from opslot.models._build import classifier_heads
from opslot.ops.linear import low_rank
from opslot.ops.linear.nf4 import dequantize
from opslot.slots import Binding, walk_slots
from opslot.slots.binding import wrapper_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

QUANTIZATION = "nf4 (bitsandbytes)"
# Its kernels count in int32.
_MOST_VALUES = 2**31 - 1


def nf4_problem(cpu_offload: bool) -> str | None:
    """Why linear layers cannot be quantized in a run, or None."""
    if not has_package("bitsandbytes"):
        return "nf4 needs bitsandbytes; pip install bitsandbytes"
    if cpu_offload:
        return "weights in nf4 cannot be offloaded; remove train.fsdp.cpu_offload"
    return None


def quantize_layers(model: PreTrainedModel, keep: Collection[str] = ()) -> list[str]:
    """Replace the linear layers of `model`, which is on meta, by layers that load their weights in NF4.

    The output head, classifier heads, routers and what is in modules with the names `keep` stay. Experts load their
    stacked weights in NF4.

    Returns:
        FQNs of the replaced layers.

    Raises:
        ConfigError: a model without linear layers, or with experts that have no weights.
    """
    experts = {slot.path: slot.module for slot in walk_slots(model) if slot.op_name == "moe_experts"}
    for path, module in experts.items():
        if unread_experts(module):
            raise ConfigError(
                f"{path} cannot be quantized: some of its experts have no weights of their own",
                hint="remove lora.quantization",
            )
    keep = {*keep, *classifier_heads(model)}
    head = model.get_output_embeddings()
    routers = [_routers(model.get_submodule(path.rpartition(".")[0]), module) for path, module in experts.items()]
    kept = {id(head), *(id(router) for found in routers for router in found)}
    found = [
        path
        for path, module in model.named_modules()
        if type(module) is nn.Linear and id(module) not in kept and not _is_in(path, keep)
    ]
    if not found:
        raise ConfigError(f"{type(model).__name__} has no linear layers to quantize", hint="remove lora.quantization")
    for path in found:
        owner, _, name = path.rpartition(".")
        setattr(model.get_submodule(owner), name, _nf4_linear(model.get_submodule(path)))
    for path, module in experts.items():
        if not _is_in(path, keep):
            quantize_experts(module)
    # PEFT then uses its layers for bitsandbytes.
    model.__dict__["is_loaded_in_4bit"] = True
    return found


def _is_in(path: str, names: Collection[str]) -> bool:
    """Whether a path is that of a module with one of the names, or inside of one."""
    return any(f".{name}." in f".{path}." for name in names)


def _routers(block: nn.Module, experts: nn.Module) -> list[nn.Module]:
    """The linear layers beside the experts that have one output for each."""
    counts = {len(p) for p in experts.parameters(recurse=False) if p.ndim == 3}
    return [m for m in block.children() if type(m) is nn.Linear and m.out_features in counts]


def _nf4_linear(linear: Any) -> nn.Module:
    layer = _nf4_class()(
        linear.in_features,
        linear.out_features,
        bias=linear.bias is not None,
        compute_dtype=linear.weight.dtype,
        quant_type="nf4",
        device="meta",
    )
    layer.weight = layer._parameter(linear.weight.data)
    layer.bias = linear.bias
    return layer


@functools.cache
def _nf4_class() -> Any:
    import bitsandbytes

    class NF4Linear(bitsandbytes.nn.Linear4bit):
        """Its weight is frozen and not part of the state dict once it is quantized."""

        quantization = QUANTIZATION

        def load_weight(self, weight: Tensor, device: torch.device | str | None) -> None:
            """Quantize `weight` on `device`."""
            self.weight = self._parameter(weight).to(device or "cpu")

        def forward(self, x: Tensor) -> Tensor:
            if low_rank.is_inference(x) or not low_rank.serves(x, self.weight.quant_state):
                return super().forward(x)
            return low_rank.linear(x, self.weight, self.bias, None)

        def _parameter(self, weight: Tensor) -> Any:
            return bitsandbytes.nn.Params4bit(weight, requires_grad=False, quant_type="nf4", module=self)

        def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
            if self.weight.is_meta:
                nn.Linear._save_to_state_dict(self, destination, prefix, keep_vars)

    return NF4Linear


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
