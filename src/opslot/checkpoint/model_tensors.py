"""The tensors that a model needs from a checkpoint, by FQN."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from opslot.checkpoint.safetensors_file import TensorSpec

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
        for name, tensor in tensors_of(model).items():
            targets[name] = first.setdefault(id(tensor), TensorSpec.of(name, tensor))
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
