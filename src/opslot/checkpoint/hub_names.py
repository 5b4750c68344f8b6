"""Checkpoints whose tensors have other names, or another form, than the model's: read as Transformers reads them.

Transformers keeps, for each architecture, the renamings and conversions between a checkpoint on the hub and the model
(`transformers.conversion_mapping`), and `save_pretrained` writes by them. Here they are asked what becomes of each name
of a folder, and sorted by what that takes:
- values that only move have a place in the model (`HubTensorConverter`): whole tensors under another name, and single
  experts under names such as `w1`, which `ExpertTensorConverter` places once they have the names it knows;
- all else goes through Transformers' own conversion, as soon as what it needs is there (`ConvertedTensors`).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from opslot._base.errors import CheckpointError
from opslot.checkpoint.converter import CheckpointTensorConverter, Shapes
from opslot.checkpoint.experts import ExpertTensorConverter, family_of, is_expert_tensor, stacked_name
from opslot.checkpoint.model_tensors import tensors_of
from opslot.checkpoint.tensor_slice import TensorSlice

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True)
class HubNames:
    """How Transformers reads the names of one checkpoint into one model.

    Attributes:
        renamed: each name of the checkpoint, as Transformers renames it; the model need not have it.
        converters: readers of every tensor for which the model has a use.
        source_keys: names of the model with numbers left out, and what the checkpoint calls those.
        model: the model, as Transformers knows it.
    """

    renamed: Mapping[str, str]
    converters: list[CheckpointTensorConverter]
    source_keys: dict[str, list[str]]
    model: Any

    def source_keys_of(self, name: str) -> list[str]:
        """What the checkpoint would call the model's tensor `name`, or the tensors that it is made of.

        They are named as their like in other layers are, else as `save_pretrained` names them.
        """
        if family_of(name) not in self.source_keys:
            saved = [family_of(stored) for stored in _saved_names(self.model, name) if _agree(stored, name)]
            self.source_keys[family_of(name)] = list(dict.fromkeys(saved)) or [family_of(name)]
        return _source_keys(name, self.source_keys)


def hub_names(model: nn.Module, shapes: Shapes) -> HubNames | None:
    """How Transformers reads a checkpoint with tensors of `shapes` into `model`.

    None when its names need no translation: `model` is none of Transformers', its architecture has no conversions or
    only those of experts stored one by one, or this release of Transformers lacks the functions that tell.
    """
    if not hasattr(model, "base_model_prefix"):  # none of Transformers', whose import would take seconds
        return None
    try:
        from transformers import PreTrainedModel
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
    except ImportError:
        return None
    if not isinstance(model, PreTrainedModel):
        return None
    upstream = transformers_view(model)
    tensors = tensors_of(model)
    experts = ExpertTensorConverter.for_model(model)
    own = get_model_conversion_mapping(upstream, add_legacy=False)
    unknown_experts = any(is_expert_tensor(name) and name not in experts.targets for name in tensors)
    if not own or (all(_is_known(transform) for transform in own) and not unknown_experts):
        return None
    transforms = get_model_conversion_mapping(upstream)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    conversions = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    by_pattern = {pattern: conversion for conversion in conversions for pattern in conversion.source_patterns}
    sorter = _Sorter(upstream, tensors, experts)
    # Some renamings act only after another did, and experts are stacked in this order.
    for name in sorted(shapes, key=dot_natural_key):
        renamed, pattern = rename_source_key(name, renamings, conversions, model.base_model_prefix, tensors)
        if renamed not in tensors and name in tensors:
            renamed, pattern = rename_source_key(name, [], [], model.base_model_prefix, tensors)
        sorter.add(name, renamed, pattern, None if pattern is None else by_pattern[pattern])
    return sorter.result()


class _Sorter:
    """Finds out what reads each tensor of a checkpoint, if the model has a use for it."""

    def __init__(self, upstream: Any, tensors: Mapping[str, Tensor], experts: ExpertTensorConverter) -> None:
        self._model, self._tensors, self._experts = upstream, tensors, experts
        self._renamed: dict[str, str] = {}
        self._placed: dict[str, str] = {}
        self._converted: dict[tuple[str, int], ConvertedTensors] = {}
        self._spellings: dict[str, list[str]] = {}

    def add(self, name: str, renamed: str, pattern: str | None, conversion: Any) -> None:
        """Sort tensor `name`, which Transformers renames to `renamed`.

        Args:
            pattern, conversion: what it converts the tensor with, and that one of its patterns which the name matched;
                None where it only renames.
        """
        self._renamed[name] = renamed
        if pattern is None:
            found = next((n for n in _with_prefix(renamed, self._model) if self._has_place(n)), None)
            if found is not None:
                self._placed[name] = found
                self._learn(name, [found])
        elif renamed in self._tensors:
            single = self._single_expert(name, renamed, pattern, conversion)
            if single is not None:
                self._placed[name] = single
                self._learn(name, [renamed, single])
            else:
                key = renamed, id(conversion)
                if key not in self._converted:
                    self._converted[key] = ConvertedTensors(conversion, renamed, self._model, self._tensors)
                self._converted[key].sources[name] = pattern
                self._learn(name, self._converted[key].targets)

    def result(self) -> HubNames:
        placing = HubTensorConverter(self._placed, self._tensors, self._experts, self._spellings)
        return HubNames(self._renamed, [placing, *self._converted.values()], self._spellings, self._model)

    def _has_place(self, name: str) -> bool:
        return name in self._tensors or self._experts.can_handle(name)

    def _single_expert(self, name: str, target: str, pattern: str, conversion: Any) -> str | None:
        """What `ExpertTensorConverter` calls tensor `name`, which is one expert's of `target`; None if it is not."""
        projection, expert = _projection(conversion, pattern, target), _expert_number(name, target)
        shape = tuple(self._tensors[target].shape)
        if projection is None or expert is None or len(shape) != 3:
            return None
        self._experts.targets.setdefault(target, shape)
        return f"{target.rpartition('.')[0]}.{expert}.{projection}.weight"

    def _learn(self, name: str, targets: Iterable[str]) -> None:
        """Note what the checkpoint calls tensors like `targets`."""
        for target in targets:
            if _agree(name, target):
                known = self._spellings.setdefault(family_of(target), [])
                if family_of(name) not in known:
                    known.append(family_of(name))


def transformers_view(model: Any) -> Any:
    """A stand-in with the same submodules as `model`, and the class that it had before FSDP2 replaced it.

    Transformers looks conversions up by class name.
    """
    stand_in: Any = object.__new__(next(cls for cls in type(model).__mro__ if not issubclass(cls, FSDPModule)))
    stand_in.__dict__.update(model.__dict__)
    return stand_in


def _with_prefix(name: str, model: Any) -> Iterator[str]:
    """`name`, and as it is in a model with, and one without, a head."""
    yield name
    if model.base_model_prefix:
        yield f"{model.base_model_prefix}.{name}"
        yield name.removeprefix(f"{model.base_model_prefix}.")


def _is_known(transform: Any) -> bool:
    """Whether all that a conversion does is to stack experts that have the names `ExpertTensorConverter` knows."""
    target = transform.target_patterns[0].replace("\\", "")
    parent, _, tensor = target.rpartition(".")
    for pattern in transform.source_patterns:
        projection = _projection(transform, pattern, target)
        if projection is None or stacked_name(projection) != tensor:
            return False
        if pattern.replace("\\", "") != f"{parent}.*.{projection}.weight":
            return False
    return True


def _projection(conversion: Any, pattern: str, target: str) -> str | None:
    """What `ExpertTensorConverter` calls an expert's tensor of `pattern`; None if `conversion` does not stack experts.

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
    """Whether the numbers in a name of the checkpoint are those in the model's, perhaps with an expert's after them."""
    numbers = _NUMBER.findall(name)
    return _NUMBER.findall(stored)[: len(numbers)] == numbers


def _expert_number(name: str, target: str) -> int | None:
    """The number in `name` that `target` has not, if there is exactly one."""
    numbers = _NUMBER.findall(name)
    for number in _NUMBER.findall(target):
        if number not in numbers:
            return None
        numbers.remove(number)
    return int(numbers[0]) if len(numbers) == 1 else None


def _source_keys(name: str, source_keys: Mapping[str, Sequence[str]]) -> list[str]:
    """`name` as others of its family are spelled; a number that it lacks stays a star."""
    found = []
    for spelling in source_keys.get(family_of(name), ()):
        for number in _NUMBER.findall(name):
            spelling = spelling.replace(".*.", f".{number}.", 1)
        found.append(spelling)
    return found


def _saved_names(model: Any, name: str) -> list[str]:
    """The names under which `save_pretrained` would write the model's tensor `name`; none when it cannot say."""
    try:
        from transformers.core_model_loading import revert_weight_conversion

        shape = tensors_of(model)[name].shape
        return list(revert_weight_conversion(model, {name: torch.empty(shape, device="meta")}))
    except Exception:  # a tensor that is one of several in its file cannot be converted alone
        return []


class HubTensorConverter:
    """Places tensors that have other names than the model's and the same values.

    Args:
        names: the checkpoint's names, and what the model, or `experts`, calls those.
        tensors: the model's.
        experts: places the tensors of single experts.
        source_keys: see `HubNames`.
    """

    def __init__(
        self,
        names: Mapping[str, str],
        tensors: Mapping[str, Tensor],
        experts: ExpertTensorConverter,
        source_keys: Mapping[str, Sequence[str]],
    ) -> None:
        self._names = names
        self._shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self._experts = experts
        self._spellings = source_keys

    @property
    def layouts(self) -> dict[str, str]:
        """Layout of each family of expert tensors, once `inspect` ran."""
        return self._experts.layouts

    def can_handle(self, name: str) -> bool:
        """Whether `name` has a place in the model."""
        return name in self._names

    def inspect(self, shapes: Shapes) -> None:
        """Find the layout of each family of expert tensors.

        Raises:
            CheckpointError: as `ExpertTensorConverter.inspect`.
        """
        self._experts.inspect({self._names[name]: shape for name, shape in shapes.items()})

    def slice_of(self, name: str, shape: tuple[int, ...]) -> TensorSlice:
        """Where tensor `name` goes.

        Raises:
            CheckpointError: as `ExpertTensorConverter.slice_of`.
        """
        renamed = self._names[name]
        if not self._experts.can_handle(renamed):
            return TensorSlice.whole(renamed, self._shapes[renamed])
        try:
            return self._experts.slice_of(renamed, shape)
        except CheckpointError as error:
            raise CheckpointError(str(error).replace(renamed, name)) from error

    def missing(self, names: Iterable[str]) -> list[str]:
        """The tensors of single experts that are absent although others of their layer are there."""
        lacking = self._experts.lacking(self._names[name] for name in names)
        return [spelled for name in lacking for spelled in _source_keys(name, self._spellings) or [name]]

    def convert(self, name: str, tensor: Tensor) -> list[tuple[str, Tensor]] | None:
        """As `ExpertTensorConverter.convert`; a whole tensor is handed out at once."""
        renamed = self._names[name]
        return self._experts.convert(renamed, tensor) if self._experts.can_handle(renamed) else [(renamed, tensor)]

    def finalize(self) -> list[tuple[str, Tensor]]:
        """As `ExpertTensorConverter.finalize`."""
        return self._experts.finalize()


class ConvertedTensors:
    """Tensors that one of Transformers' conversions makes, for one place of the model, of others in the checkpoint.

    Args:
        conversion: a `WeightConverter`; it is copied for use.
        target: the model's name for the first tensor that it makes.
        model: what the conversion may look sizes up in.
        tensors: the model's.

    Attributes:
        sources: the tensors that it takes, in the order in which they are stacked, and the pattern that each matched.
        targets: the model's tensors that it makes.
    """

    def __init__(self, conversion: Any, target: str, model: Any, tensors: Mapping[str, Tensor]) -> None:
        self.sources: dict[str, str] = {}
        first = conversion.target_patterns[0]
        names = [target.replace(first, pattern, 1) for pattern in conversion.target_patterns]
        self.targets = {name: tuple(tensors[name].shape) for name in names if name in tensors}
        self._conversion, self._target, self._model = conversion, target, model
        self._arrived: dict[str, Tensor] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> ConvertedTensors:
        """A converter of the same tensors that has none of them yet; the model stays one."""
        fresh = copy.copy(self)
        fresh._arrived = {}
        return fresh

    def can_handle(self, name: str) -> bool:
        """Whether `name` is one of the tensors that the conversion takes."""
        return name in self.sources

    def convert(self, name: str, tensor: Tensor) -> list[tuple[str, Tensor]] | None:
        """What the conversion makes, once its last tensor came.

        Raises:
            CheckpointError: the tensors cannot be converted, or not into what the model has.
        """
        self._arrived[name] = tensor
        if len(self._arrived) < len(self.sources):
            return None
        arrived, self._arrived = self._arrived, {}
        conversion = copy.deepcopy(self._conversion)
        for source, pattern in self.sources.items():
            conversion.add_tensor(self._target, source, pattern, arrived[source])
        try:
            made = conversion.convert(self._target, model=self._model, config=self._model.config)
        except Exception as error:
            raise self._refusal(arrived, f"{type(error).__name__}: {error}") from error
        handed = [(target, value[0] if isinstance(value, list) else value) for target, value in made.items()]
        for target, value in handed:
            wanted = self.targets.get(target)
            if wanted not in (None, tuple(value.shape)):
                raise self._refusal(arrived, f"they make {target} {list(value.shape)}, the model has {list(wanted)}")
        return handed

    def finalize(self) -> list[tuple[str, Tensor]]:
        """Nothing is left: the tensors to come are known from the start.

        Raises:
            CheckpointError: some did not come.
        """
        absent = [name for name in self.sources if name not in self._arrived]
        if self._arrived and absent:
            raise CheckpointError(f"{self._target} is made of several tensors; {', '.join(absent)} did not come")
        return []

    def _refusal(self, arrived: Mapping[str, Tensor], reason: str) -> CheckpointError:
        found = ", ".join(f"{name} {list(arrived[name].shape)}" for name in self.sources)
        lacking = ", ".join(self._lacking())
        told = f"the checkpoint lacks {lacking}" if lacking else reason
        return CheckpointError(f"{', '.join(self.targets)} from {found}: {told}")

    def _lacking(self) -> Iterator[str]:
        """Names of tensors that the conversion has patterns for and the checkpoint does not hold."""
        name, pattern = next(iter(self.sources.items()))
        present, given = set(self.sources.values()), pattern.replace("\\", "")
        for other in self._conversion.source_patterns:
            if other not in present:
                wanted = other.replace("\\", "")
                yield name.replace(given, wanted) if given in name else wanted
