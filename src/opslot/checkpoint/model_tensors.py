"""The tensors that a model needs from a checkpoint, by FQN."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from opslot.checkpoint.safetensors_file import TensorSpec
from opslot.slots.protocol import removed_experts, walk_slots

# Checkpoints of 2023 and before hold the rotary frequencies of every layer; models compute them.
_ALWAYS_IGNORED = r"(^|\.)rotary_emb\.inv_freq$"
_WRAPPERS = re.compile(r"(^|(?<=\.))(_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")


def clean_fqn(name: str) -> str:
    """`name` of a parameter without the prefixes of torch.compile, activation checkpointing and FSDP."""
    return _WRAPPERS.sub("", name)


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and persistent buffers of `model` by FQN; tied ones appear under each name."""
    state = model.state_dict(keep_vars=True)
    return {clean_fqn(name): value for name, value in state.items() if isinstance(value, Tensor)}


def stored_specs(model: nn.Module) -> dict[str, TensorSpec]:
    """Name, dtype and shape that each of `tensors_of(model)` has in checkpoints.

    The shape includes experts that nothing reads and that expert parallelism removed.
    """
    removed = {
        clean_fqn(f"{path}.{name}"): count
        for path, module in model.named_modules()
        for name, count in removed_experts(module).items()
    }
    specs = {name: TensorSpec.of(name, tensor) for name, tensor in tensors_of(model).items()}
    for name, count in removed.items():
        # The state dict lacks quantized experts.
        if name in specs:
            experts, *rest = specs[name].shape
            specs[name] = replace(specs[name], shape=(experts + count, *rest))
    return specs


def with_removed_experts(tensor: Tensor, spec: TensorSpec) -> Tensor:
    """A tensor of a model or a gradient with as many experts as in `spec`, of `stored_specs`; those added are zero."""
    if tensor.shape == spec.shape:
        return tensor
    return torch.cat([tensor, tensor.new_zeros(spec.shape[0] - len(tensor), *spec.shape[1:])])


def unread_experts(module: nn.Module) -> dict[str, int]:
    """By parameter of a module with a slot for experts, how many of its last experts nothing reads.

    LongCat's `gate_up_proj` also has rows for the experts that return their input, `down_proj` has none. Those that
    expert parallelism removed are not counted.
    """
    counts = {name: len(weight) for name, weight in module.named_parameters(recurse=False) if weight.ndim == 3}
    return {name: count - min(counts.values()) for name, count in counts.items() if count > min(counts.values())}


def partly_read_experts(model: nn.Module) -> set[str]:
    """The FQNs of parameters with experts that nothing reads, whether or not expert parallelism removed them."""
    return {
        clean_fqn(f"{path}.{name}")
        for path, module, _, op_name, _ in walk_slots(model)
        if op_name == "moe_experts"
        for name in {**unread_experts(module), **removed_experts(module)}
    }


@dataclass(frozen=True)
class ModelTensors:
    """The tensors that a model needs from a checkpoint.

    Attributes:
        targets: what a checkpoint fills, by name; each name of a tied tensor leads to one with its first name.
        prefix: what a base model's names lack and its ForCausalLM's have, with the dot, e.g. "model."; ""
            when unknown.
        ignored: regular expressions of checkpoint names that the model has no use for.
        optional: regular expressions of the model's names that checkpoints leave out.
    """

    targets: Mapping[str, TensorSpec]
    prefix: str = ""
    ignored: Sequence[str] = ()
    optional: Sequence[str] = ()

    @classmethod
    def of(cls, model: nn.Module) -> ModelTensors:
        """The tensors of `model`."""
        targets: dict[str, TensorSpec] = {}
        first: dict[int, TensorSpec] = {}
        specs = stored_specs(model)
        for name, tensor in tensors_of(model).items():
            targets[name] = first.setdefault(id(tensor), specs[name])
        transient = {clean_fqn(name) for name, _ in model.named_buffers()} - targets.keys()
        prefix = getattr(model, "base_model_prefix", "")
        return cls(
            targets,
            f"{prefix}." if prefix else "",
            [
                _ALWAYS_IGNORED,
                *(f"^{re.escape(name)}$" for name in transient),
                *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()),
            ],
            list(getattr(model, "_keys_to_ignore_on_load_missing", None) or ()),
        )

    def names_in_model(self, names: Iterable[str]) -> dict[str, str]:
        """The name that each tensor of a checkpoint has in this model.

        The prefix of a base model is added or removed if checkpoint and model differ in it.
        """
        prefix, names = self.prefix, list(names)
        model_has = any(name.startswith(prefix) for name in self.targets)
        file_has = any(name.startswith(prefix) for name in names)
        if not prefix or model_has == file_has:
            return {name: name for name in names}
        if file_has:
            return {name: name.removeprefix(prefix) for name in names}
        return {name: name if name in self.targets else prefix + name for name in names}
