"""Position ids of multimodal rotary embeddings, computed on the CPU with the model class's own `get_rope_index`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from opslot._base.source import forward_source, takes_text_axis

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# Parameters of `get_rope_index` that processors name differently.
_ALIASES = {"second_per_grids": "video_second_per_grid", "audio_seqlens": "feature_attention_mask"}
# Methods that the forward of a model with such positions calls.
_CALLED = ("self.get_rope_index(", "self.compute_3d_position_ids(")


class RopePositions:
    """Positions of a sample for each axis of the model's rotary embedding.

    The class is constructed on the meta device, once per process: only its configuration is used.

    Args:
        config: of the model.
        class_name: of Transformers.
    """

    def __init__(self, config: PreTrainedConfig, class_name: str) -> None:
        self.config = config
        self.class_name = class_name

    def __getstate__(self) -> dict[str, Any]:
        return {"config": self.config, "class_name": self.class_name}

    @cached_property
    def model(self) -> Any:
        """The model on the meta device."""
        import transformers

        with torch.device("meta"):
            return getattr(transformers, self.class_name)._from_config(self.config)

    @cached_property
    def _module(self) -> Any:
        """The module whose forward computes positions; some classes inherit the method and do not call it."""
        found = (module for module in self.model.modules() if hasattr(module, "get_rope_index"))
        return next((module for module in found if any(name in forward_source(type(module)) for name in _CALLED)), None)

    @property
    def axes(self) -> int:
        """Axes of the positions; 1 for a model that does not call `get_rope_index`."""
        return 1 if self._module is None else 3

    @cached_property
    def needs_types(self) -> bool:
        """Whether positions follow from the kind of each token, text or image."""
        return (
            self._module is not None
            and "mm_token_type_ids" in inspect.signature(self._module.get_rope_index).parameters
        )

    @cached_property
    def takes_text_axis(self) -> bool:
        """Whether the model takes the positions of packed documents as an axis before the others."""
        return any(map(takes_text_axis, {type(module) for module in self.model.modules()}))

    def __call__(self, input_ids: torch.Tensor, features: Mapping[str, Any]) -> torch.Tensor:
        """int64 [axes, S] for the tokens [S] of one sample.

        Args:
            features: what the processor returned besides the tokens, and settings that `get_rope_index` takes.
        """
        plain = torch.arange(len(input_ids)).expand(self.axes, -1)
        if self._module is None or all(name.endswith("token_type_ids") for name in features):
            return plain
        known: dict[str, Any] = {
            "input_ids": input_ids[None],
            "attention_mask": torch.ones_like(input_ids)[None],
            **features,
        }
        arguments = {}
        for name in inspect.signature(self._module.get_rope_index).parameters:
            source = _ALIASES.get(name, name)
            if source in known:
                value = known[source]
                arguments[name] = value.sum(-1) if name == "audio_seqlens" else value
        positions, _ = self._module.get_rope_index(**arguments)
        return positions[:, 0].long()
