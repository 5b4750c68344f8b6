"""Frozen linear layers and experts with weights in NF4 (QLoRA, Dettmers et al. 2023), quantized by bitsandbytes.

A layer is made on meta and quantizes its weight as the checkpoint is read, so the model is never in memory unquantized.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from opslot._base.device import has_package
from opslot._base.errors import ConfigError
from opslot.checkpoint.model_tensors import unread_experts
from opslot.models._adapters.quantized_experts import QUANTIZATION, quantize_experts
from opslot.models._build import classifier_heads
from opslot.ops.linear import low_rank
from opslot.slots import walk_slots

if TYPE_CHECKING:
    from transformers import PreTrainedModel

INSTALL = "pip install bitsandbytes"


def nf4_problem(cpu_offload: bool) -> str | None:
    """Why linear layers cannot be quantized in a run, or None."""
    if not has_package("bitsandbytes"):
        return f"nf4 needs bitsandbytes; {INSTALL}"
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
