"""Reading checkpoints whose source keys or shapes differ from the model's, as Transformers reads them.

Transformers has renamings and conversions between the hub's checkpoints and the model for each architecture
(`transformers.conversion_mapping`), which `save_pretrained` reverts. Here each source key is mapped by them:
- tensors whose values are only copied are read slice by slice: renamed tensors, and single experts under names such as
  `w1`, which `ExpertTensorConverter` handles after renaming;
- all others go through Transformers' conversion once its inputs are complete (`ConvertedTensors`).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from opslot._base.errors import CheckpointError
from opslot.checkpoint.converter import Converter, Shapes
from opslot.checkpoint.experts import STACKED_NAME, ExpertTensorConverter, family_of, is_expert_tensor
from opslot.checkpoint.hub_format import HubFormat, transformers_view
from opslot.checkpoint.model_tensors import stored_specs
from opslot.checkpoint.safetensors_file import TensorSpec

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True)
class HubNames:
    """How Transformers maps the source keys of a checkpoint to a model.

    Attributes:
        renamed: each source key, as Transformers renames it; the model need not have the result.
        copied: the source keys of tensors whose values are copied, and their names in the model or per expert.
        converters: of other tensors under their source keys, and of experts under the names in `copied`.
        source_keys: FQNs of the model with layer numbers as `*`, and their source keys.
        model: the model, of Transformers' class.
    """

    renamed: Mapping[str, str]
    copied: Mapping[str, str]
    converters: list[Converter]
    source_keys: dict[str, list[str]]
    model: Any

    def source_keys_of(self, name: str) -> list[str]:
        """The source keys of the model's tensor `name`, as in other layers, else as `save_pretrained` writes them."""
        if family_of(name) not in self.source_keys:
            saved = [family_of(stored) for stored in _saved_names(self.model, name) if _agree(stored, name)]
            self.source_keys[family_of(name)] = list(dict.fromkeys(saved)) or [family_of(name)]
        found = []
        for key in self.source_keys[family_of(name)]:
            # A number that the name does not have, as that of an expert, stays `*`.
            for number in _NUMBER.findall(name):
                key = key.replace(".*.", f".{number}.", 1)
            found.append(key)
        return found


def hub_names(model: nn.Module, shapes: Shapes) -> HubNames | None:
    """How Transformers reads a checkpoint with tensors of `shapes` into `model`.

    None if no renaming is needed: `model` is not a Transformers model, or its architecture has no conversions or only
    those of per-expert tensors and the checkpoint no names of earlier releases (LayerNorm.gamma of the first BERT).
    """
    if not hasattr(model, "base_model_prefix"):  # not a Transformers model, and importing Transformers takes seconds
        return None
    from transformers import PreTrainedModel
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    if not isinstance(model, PreTrainedModel):
        return None
    view = transformers_view(model)
    tensors = stored_specs(model)
    experts = ExpertTensorConverter.for_model(model)
    own = get_model_conversion_mapping(view, add_legacy=False)
    unknown_experts = any(is_expert_tensor(name) and name not in experts.targets for name in tensors)
    transforms = get_model_conversion_mapping(view)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]

    def rename(name: str, renamings: list[Any]) -> str:
        return rename_source_key(name, renamings, [], model.base_model_prefix, tensors)[0]

    if not own and all(name in tensors or rename(name, renamings) == rename(name, []) for name in shapes):
        return None
    if own and all(_is_known(transform) for transform in own) and not unknown_experts:
        return None
    conversions = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    by_pattern = {pattern: conversion for conversion in conversions for pattern in conversion.source_patterns}
    assigner = _Assigner(view, tensors, experts)
    # Transformers' order: some renamings depend on others, and experts are stacked in it.
    for name in sorted(shapes, key=dot_natural_key):
        renamed, pattern = rename_source_key(name, renamings, conversions, model.base_model_prefix, tensors)
        if renamed not in tensors and name in tensors:
            renamed, pattern = rename_source_key(name, [], [], model.base_model_prefix, tensors)
        assigner.add(name, renamed, pattern, None if pattern is None else by_pattern[pattern])
    return assigner.result()


class _Assigner:
    """Assigns each tensor of a checkpoint to a converter."""

    def __init__(self, model: Any, tensors: Mapping[str, TensorSpec], experts: ExpertTensorConverter) -> None:
        self._model, self._tensors, self._experts = model, tensors, experts
        self._renamed: dict[str, str] = {}
        self._copied: dict[str, str] = {}
        self._converted: dict[tuple[str, int], ConvertedTensors] = {}
        self._known_keys: dict[str, list[str]] = {}

    def add(self, name: str, renamed: str, pattern: str | None, conversion: Any) -> None:
        """Assign tensor `name`, which Transformers renames to `renamed`.

        Args:
            pattern, conversion: the conversion, and its pattern that matches the name; None if it is only renamed.
        """
        self._renamed[name] = renamed
        if pattern is None:
            names = _with_prefix(renamed, self._model)
            found = next((n for n in names if n in self._tensors or self._experts.can_handle(n)), None)
            # Transformers does not read some names that it writes itself: see `HubFormat`.
            found = found or self._written.get(name)
            if found is not None:
                self._copied[name] = found
                self._learn(name, [found])
        elif renamed in self._tensors:
            single = self._single_expert(name, renamed, pattern, conversion)
            if single is not None:
                self._copied[name] = single
                self._learn(name, [renamed, single])
            else:
                key = renamed, id(conversion)
                if key not in self._converted:
                    self._converted[key] = ConvertedTensors(conversion, renamed, self._model, self._tensors)
                self._converted[key].sources[name] = pattern
                self._learn(name, self._converted[key].targets)

    def result(self) -> HubNames:
        converters: list[Converter] = [*self._converted.values(), self._experts]
        return HubNames(self._renamed, self._copied, converters, self._known_keys, self._model)

    @cached_property
    def _written(self) -> dict[str, str]:
        """The model's tensors, by the names that `save_pretrained` gives to those of which it copies the values."""
        return {saved: name for name, saved in HubFormat(self._model).renamed(self._tensors).items()}

    def _single_expert(self, name: str, target: str, pattern: str, conversion: Any) -> str | None:
        """The per-expert name of `name`, for `ExpertTensorConverter`; None if it is not one expert's of `target`."""
        projection, expert = _projection(conversion, pattern, target), _expert_number(name, target)
        shape = self._tensors[target].shape
        if projection is None or expert is None or len(shape) != 3:
            return None
        self._experts.targets.setdefault(target, shape)
        return f"{target.rpartition('.')[0]}.{expert}.{projection}.weight"

    def _learn(self, name: str, targets: Iterable[str]) -> None:
        """Remember the source keys of tensors like `targets`."""
        for target in targets:
            if _agree(name, target):
                known = self._known_keys.setdefault(family_of(target), [])
                if family_of(name) not in known:
                    known.append(family_of(name))


def _with_prefix(name: str, model: Any) -> Iterator[str]:
    """`name` with and without the base model's prefix."""
    yield name
    if model.base_model_prefix:
        yield f"{model.base_model_prefix}.{name}"
        yield name.removeprefix(f"{model.base_model_prefix}.")


def _is_known(transform: Any) -> bool:
    """Whether a conversion only stacks or transposes experts whose names `ExpertTensorConverter` handles."""
    target = transform.target_patterns[0].replace("\\", "")
    parent, _, tensor = target.rpartition(".")
    steps = [(type(op).__name__, getattr(op, "check_dims", False)) for op in getattr(transform, "operations", ())]
    if steps == [("Transpose", True)]:
        # Transformers compares shapes of one tensor, and a square one keeps its layout. The others tell it.
        return is_expert_tensor(target) and list(transform.source_patterns) == list(transform.target_patterns)
    for pattern in transform.source_patterns:
        projection = _projection(transform, pattern, target)
        if projection is None or STACKED_NAME[projection] != tensor:
            return False
        if pattern.replace("\\", "") != f"{parent}.*.{projection}.weight":
            return False
    return True


def _projection(conversion: Any, pattern: str, target: str) -> str | None:
    """The projection, e.g. "gate_proj", that `pattern` matches; None if `conversion` does not stack experts.

    Args:
        target: the experts' tensor, as the model names it.
    """
    parent, _, tensor = target.rpartition(".")
    if parent.rpartition(".")[2] != "experts" or len(conversion.target_patterns) != 1:
        return None
    steps = [(type(op).__name__, getattr(op, "dim", None)) for op in getattr(conversion, "operations", ())]
    projections: list[str] = []
    if steps == [("MergeModulelist", 0)] and tensor in ("gate_proj", "up_proj", "down_proj"):
        projections = [tensor]
    elif steps == [("MergeModulelist", 0), ("Concatenate", 1)] and tensor == "gate_up_proj":
        projections = ["gate_proj", "up_proj"]
    if len(projections) != len(conversion.source_patterns):
        return None
    return projections[conversion.source_patterns.index(pattern)]


def _agree(stored: str, name: str) -> bool:
    """Whether the numbers in a source key are those of the FQN, possibly followed by an expert's."""
    numbers = _NUMBER.findall(name)
    return _NUMBER.findall(stored)[: len(numbers)] == numbers


def _expert_number(name: str, target: str) -> int | None:
    """The only number in `name` that `target` does not have; None if there are more or none."""
    numbers = _NUMBER.findall(name)
    for number in _NUMBER.findall(target):
        if number not in numbers:
            return None
        numbers.remove(number)
    return int(numbers[0]) if len(numbers) == 1 else None


def _saved_names(model: Any, name: str) -> list[str]:
    """The names under which `save_pretrained` writes the model's tensor `name`; none if that is unknown."""
    try:
        from transformers.core_model_loading import revert_weight_conversion

        shape = stored_specs(model)[name].shape
        return list(revert_weight_conversion(model, {name: torch.empty(shape, device="meta")}))
    except Exception:  # a tensor that is converted together with others
        return []


class ConvertedTensors:
    """Tensors of one module that one of Transformers' conversions makes from tensors of the checkpoint.

    Args:
        conversion: a `WeightConverter`; it is copied for use.
        target: the model's name for the first tensor that it makes.
        model: the conversion may read sizes from it.
        tensors: the model's.

    Attributes:
        sources: its input tensors, in the order in which they are stacked, and the pattern that each matches.
        targets: the model's tensors that it makes.
    """

    def __init__(self, conversion: Any, target: str, model: Any, tensors: Mapping[str, TensorSpec]) -> None:
        self.sources: dict[str, str] = {}
        first = conversion.target_patterns[0]
        names = [target.replace(first, pattern, 1) for pattern in conversion.target_patterns]
        self.targets = {name: tensors[name].shape for name in names if name in tensors}
        self._conversion, self._target, self._model = conversion, target, model
        self._inputs: dict[str, Tensor] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> ConvertedTensors:
        """A converter of the same tensors without any of them; shares the model."""
        copied = copy.copy(self)
        copied._inputs = {}
        return copied

    def can_handle(self, name: str) -> bool:
        """Whether `name` is an input of the conversion."""
        return name in self.sources

    def convert(self, name: str, tensor: Tensor) -> list[tuple[str, Tensor]] | None:
        """The results, once the last input is given.

        Raises:
            CheckpointError: the tensors cannot be converted, or the results have other shapes than the model's.
        """
        self._inputs[name] = tensor
        if len(self._inputs) < len(self.sources):
            return None
        inputs, self._inputs = self._inputs, {}
        conversion = copy.deepcopy(self._conversion)
        for source, pattern in self.sources.items():
            conversion.add_tensor(self._target, source, pattern, inputs[source])
        try:
            made = conversion.convert(self._target, model=self._model, config=self._model.config)
        except Exception as error:
            raise self._error(inputs, f"{type(error).__name__}: {error}") from error
        results = [(target, value[0] if isinstance(value, list) else value) for target, value in made.items()]
        for target, value in results:
            wanted = self.targets.get(target)
            if wanted not in (None, tuple(value.shape)):
                raise self._error(inputs, f"they make {target} {list(value.shape)}, the model has {list(wanted)}")
        return results

    def finalize(self) -> list[tuple[str, Tensor]]:
        """Returns nothing.

        Raises:
            CheckpointError: inputs are missing.
        """
        absent = [name for name in self.sources if name not in self._inputs]
        if self._inputs and absent:
            raise CheckpointError(
                f"{self._target} is made of several tensors; {', '.join(absent)} are missing",
                hint="give the whole checkpoint",
            )
        return []

    def _error(self, inputs: Mapping[str, Tensor], reason: str) -> CheckpointError:
        found = ", ".join(f"{name} {list(inputs[name].shape)}" for name in self.sources)
        lacking = ", ".join(self._lacking())
        message = f"the checkpoint lacks {lacking}" if lacking else reason
        return CheckpointError(
            f"{', '.join(self.targets)} from {found}: {message}",
            hint="add the missing shards" if lacking else "give the checkpoint of this model's config",
        )

    def _lacking(self) -> Iterator[str]:
        """Names of inputs of the conversion that are not in the checkpoint."""
        name, pattern = next(iter(self.sources.items()))
        present, given = set(self.sources.values()), pattern.replace("\\", "")
        for other in self._conversion.source_patterns:
            if other not in present:
                wanted = other.replace("\\", "")
                yield name.replace(given, wanted) if given in name else wanted
