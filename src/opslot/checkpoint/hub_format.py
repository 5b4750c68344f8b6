"""Writing a model's tensors under the names and in the form that Transformers' `save_pretrained` gives them.

That is what the hub has of an architecture, and what every library reads: Mixtral's experts, which are two stacked
tensors a layer in the model, are `block_sparse_moe.experts.<e>.w1.weight` and so on in its checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from opslot.checkpoint.safetensors_file import TensorSpec
from opslot.slots.binding import original_class


@dataclass(frozen=True)
class HubGroup:
    """Tensors of a model that become tensors of a checkpoint together.

    Attributes:
        sources: the model's names.
        results: the checkpoint's.
        converts: whether values are split, merged or transposed; otherwise the one source is only renamed.
    """

    sources: tuple[str, ...]
    results: Sequence[TensorSpec]
    converts: bool


class HubFormat:
    """What `save_pretrained` makes of the tensors of one model.

    Args:
        model: a Transformers model, sharded by FSDP2 or not.
    """

    def __init__(self, model: nn.Module) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange, WeightConverter, WeightRenaming

        self._model = transformers_view(model)
        loading = get_model_conversion_mapping(self._model)
        self._loading = tuple([t for t in loading if isinstance(t, kind)] for kind in (WeightRenaming, WeightConverter))
        transforms = getattr(model, "_weight_conversions", None)
        if transforms is None:
            mapping = get_model_conversion_mapping(self._model, add_legacy=False)
            # As in `save_pretrained`: nothing was loaded, so there is no prefix to restore.
            transforms = [t for t in mapping if not isinstance(t, PrefixChange)]
        # Looked up by every conversion, so it is computed once.
        self._model.__dict__["_weight_conversions"] = transforms
        reverse = [transform.reverse_transform() for transform in reversed(transforms)]
        self._converters = [transform for transform in reverse if isinstance(transform, WeightConverter)]
        self._renamings = [transform for transform in reverse if isinstance(transform, WeightRenaming)]

    def groups(self, tensors: Mapping[str, TensorSpec]) -> list[HubGroup]:
        """The model's tensors grouped by the conversion that they share, in the model's order."""
        grouped: dict[tuple[int, str], list[str]] = {}
        for name in tensors:
            grouped.setdefault(self._key(name), []).append(name)
        return [self._group(key, names, tensors) for key, names in grouped.items()]

    def convert(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The checkpoint's tensors of one group's sources."""
        from transformers.core_model_loading import revert_weight_conversion

        return revert_weight_conversion(self._model, dict(tensors))

    def renamed(self, tensors: Iterable[str]) -> dict[str, str]:
        """The names that `save_pretrained` gives to those of the model's tensors whose values it copies."""
        return {name: self._renamed(name) for name in tensors if self._key(name)[0] < 0}

    def _renamed(self, name: str) -> str:
        for renaming in self._renamings:
            name, _ = renaming.rename_source_key(name)
        return name

    def _readable(self, name: str, saved: str, tensors: Mapping[str, TensorSpec]) -> str:
        """`saved`, or `name` where Transformers reads only that as the model's tensor `name`.

        Some renamings of a model_type are for one of its classes: those of ShieldGemma 2 are for its classifier, and
        Transformers' Auto classes take Gemma 3's class for it.
        """
        read = partial(self.read_as, tensors=tensors)
        return name if saved != name and read(saved) != name and read(name) == name else saved

    def read_as(self, saved: str, tensors: Mapping[str, TensorSpec]) -> str:
        """The model's tensor as which Transformers reads the checkpoint's `saved`."""
        from transformers.core_model_loading import rename_source_key

        return rename_source_key(saved, *self._loading, self._model.base_model_prefix, tensors)[0]

    def _key(self, name: str) -> tuple[int, str]:
        for index, converter in enumerate(self._converters):
            renamed, pattern = converter.rename_source_key(name)
            if pattern is not None:
                return index, renamed
        return -1, name

    def _group(self, key: tuple[int, str], names: Sequence[str], tensors: Mapping[str, TensorSpec]) -> HubGroup:
        index, name = key
        if index < 0:
            saved = self._readable(name, self._renamed(name), tensors)
            return HubGroup((name,), [replace(tensors[name], name=saved)], converts=False)
        specs = [tensors[name] for name in names]
        sources = {spec.name: torch.empty(spec.shape, dtype=spec.dtype, device="meta") for spec in specs}
        results = [TensorSpec.of(name, tensor) for name, tensor in self.convert(sources).items()]
        return HubGroup(tuple(names), results, converts=True)


def transformers_view(model: Any) -> Any:
    """An object with the modules of `model`, of the class that it had before FSDP2 derived its own.

    Transformers looks conversions up by class name.
    """
    stand_in: Any = object.__new__(original_class(model))
    stand_in.__dict__.update(model.__dict__)
    return stand_in


def hub_format(model: Any) -> HubFormat | None:
    """How `save_pretrained` writes `model`; None when it writes the model's own names and values."""
    if not hasattr(model, "base_model_prefix"):  # not a Transformers model, and importing Transformers takes seconds
        return None
    found = HubFormat(model)
    return found if found._converters or found._renamings else None
