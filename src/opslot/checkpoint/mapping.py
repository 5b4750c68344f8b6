"""Mapping a checkpoint's tensors to slices of a model's, from headers alone, before anything is written."""

from __future__ import annotations

import copy
import fnmatch
import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from opslot._base.errors import CheckpointError
from opslot.checkpoint._report import Problems
from opslot.checkpoint.converter import CheckpointTensorConverter, Converter, SlicingConverter
from opslot.checkpoint.experts import ExpertTensorConverter
from opslot.checkpoint.hub_names import ConvertedTensors, HubNames
from opslot.checkpoint.model_tensors import ModelTensors
from opslot.checkpoint.quantized import whole_tensor
from opslot.checkpoint.safetensors_file import MappedFile, TensorEntry, TensorSpec
from opslot.checkpoint.tensor_slice import TensorSlice, is_numeric_cast, volume


@dataclass(frozen=True, slots=True)
class MappedSlice:
    """One checkpoint tensor and the slice of a parameter that it fills."""

    entry: TensorEntry
    tensor_slice: TensorSlice


@dataclass(frozen=True)
class Stream:
    """Checkpoint tensors that go through a converter, in order, by the model's name for them."""

    converter: CheckpointTensorConverter
    entries: list[tuple[str, TensorEntry]]


@dataclass
class LoadMapping:
    """Which tensors fill which parameters.

    Attributes:
        slices: tensors that are copied.
        streams: tensors that go through a converter.
        missing: model tensors that the checkpoint lacks and may lack.
        extra: checkpoint tensors that are left out.
        layouts: layout of each family of expert tensors.
    """

    slices: list[MappedSlice] = field(default_factory=list)
    streams: list[Stream] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    layouts: dict[str, str] = field(default_factory=dict)


def map_tensors(
    entries: Mapping[str, TensorEntry],
    model: ModelTensors,
    converters: Sequence[Converter],
    problems: Problems,
    *,
    allow_missing: Collection[str] = (),
    allow_extra: Collection[str] = (),
    names: HubNames | None = None,
) -> LoadMapping:
    """Map every tensor of the checkpoint and check that every tensor of the model is filled exactly once.

    Args:
        entries: the checkpoint's tensors.
        model: what the model needs.
        converters: in order; the first that can handle a tensor gets it.
        problems: collects what is wrong; do not use the mapping if there is any.
        allow_missing, allow_extra: name patterns (`fnmatch`) of the model's and the checkpoint's tensors that
            may be missing or left out.
        names: Transformers' renamings. None: names are the model's, except a base model's prefix.
    """
    if names is None:
        named = _under_model_names(entries, model, converters)
    else:
        named = [(names.copied.get(name, name), entry) for name, entry in entries.items()]
    return _Mapper(model, problems, allow_missing, allow_extra, names).map(named, converters)


# A tensor of the checkpoint, and its name in the model or for a converter; the entry has its name in the file.
_Named = tuple[str, TensorEntry]


@dataclass(eq=False)
class _Mapper:
    model: ModelTensors
    problems: Problems
    allow_missing: Collection[str]
    allow_extra: Collection[str]
    names: HubNames | None
    result: LoadMapping = field(default_factory=LoadMapping)
    filled: Counter[str] = field(default_factory=Counter)
    taken: dict[tuple[str, tuple[tuple[int, int], ...]], TensorEntry] = field(default_factory=dict)
    from_converters: set[str] = field(default_factory=set)
    damaged: set[str] = field(default_factory=set)
    explained: bool = False

    def map(self, entries: Sequence[_Named], converters: Sequence[Converter]) -> LoadMapping:
        owned, plain = _assign(entries, converters)
        for converter, mine in zip(converters, owned):
            if isinstance(converter, SlicingConverter):
                self._place(converter, mine)
            elif mine:
                self._dry_run(converter, mine)
        for name, entry in plain:
            target = self.model.targets.get(name)
            if target is not None:
                self._put(entry, TensorSlice.whole(target.name, target.shape))
            else:
                self._leave_out(entry.name)
        self._check_filled()
        return self.result

    def _place(self, converter: SlicingConverter, mine: Sequence[_Named]) -> None:
        try:
            converter.inspect({name: entry.shape for name, entry in mine})
        except CheckpointError as error:
            self.problems.add("layout", error.problem, error.hint)
            self.damaged.update(self.model.targets)
            return
        if isinstance(converter, ExpertTensorConverter):
            self.result.layouts |= converter.layouts
        for name, entry in mine:
            try:
                self._put(entry, converter.slice_of(name, entry.shape))
            except CheckpointError as error:
                problem = error.problem.replace(name, entry.name)
                hint = error.hint or "give the checkpoint of this model's config"
                self.problems.add("tensors that cannot be mapped", problem, hint)
        for item in self._missing(converter, [name for name, _ in mine]):
            self.explained = True
            self.problems.add("incomplete experts", item, "add the missing shards or tensors")

    def _missing(self, converter: SlicingConverter, names: Iterable[str]) -> list[str]:
        if self.names is None or not isinstance(converter, ExpertTensorConverter):
            return converter.missing(names)
        return [key for name in converter.lacking(names) for key in self.names.source_keys_of(name)]

    def _dry_run(self, converter: CheckpointTensorConverter, mine: Sequence[_Named]) -> None:
        """Run a copy of a converter on meta tensors, and map what it returns."""
        copied = copy.deepcopy(converter)
        returned: list[tuple[str, Tensor]] = []
        try:
            for name, entry in mine:
                at = f"convert({name!r})"
                returned += copied.convert(name, torch.empty(entry.shape, dtype=entry.dtype, device="meta")) or ()
            at = "finalize"
            returned += copied.finalize()
        except CheckpointError as error:
            self.problems.add("tensors that a converter rejects", error.problem, error.hint)
            if isinstance(converter, ConvertedTensors):
                self.damaged.update(self.model.targets[name].name for name in converter.targets)
            return
        except Exception as error:
            raise CheckpointError(
                f"{type(converter).__name__}.{at} failed on meta tensors, which the dry run uses",
                found=f"{type(error).__name__}: {error}",
                hint="use only names and shapes, and return (name, tensor) pairs",
            ) from error
        _, source = mine[0]
        for name, tensor in returned:
            target = self.model.targets.get(name)
            if target is None:
                self._leave_out(name)
                continue
            self.from_converters.add(target.name)
            entry = TensorEntry(name, source.file, tensor.dtype, tuple(tensor.shape), 0, 0)
            self._account(entry, TensorSlice.whole(target.name, target.shape))
        self.result.streams.append(Stream(converter, list(mine)))

    def _put(self, entry: TensorEntry, tensor_slice: TensorSlice) -> None:
        if self._account(entry, tensor_slice):
            self.result.slices.append(MappedSlice(entry, tensor_slice))

    def _account(self, entry: TensorEntry, tensor_slice: TensorSlice) -> bool:
        """Record the slice that `entry` fills; False if it does not fit or is filled already."""
        name, target = entry.name, self.model.targets[tensor_slice.target]
        if entry.shape != tensor_slice.shape:
            item = f"{name}: found {list(entry.shape)}, expected {list(tensor_slice.shape)}"
            self.problems.add("tensors of another shape", item, "give the checkpoint of this model's config")
            self.damaged.add(target.name)
            return False
        if not is_numeric_cast(entry.dtype, target.dtype):
            item = f"{name}: found {entry.dtype}, the model holds {target.dtype}"
            self.problems.add(
                "dtypes that cannot be converted", item, "dequantize the checkpoint, or load it with its own library"
            )
            self.damaged.add(target.name)
            return False
        key = target.name, tuple((r.start, r.stop) for r in tensor_slice.region)
        if key in self.taken and target.name in self.from_converters:
            hint = "return each parameter once, and tied ones under one name"
            self.problems.add("parameters that a converter and another source fill", name, hint)
            return False
        if key in self.taken:
            self._check_same(self.taken[key], entry)
            return False
        self.taken[key] = entry
        self.filled[target.name] += volume(tensor_slice.region)
        return True

    def _check_same(self, first: TensorEntry, second: TensorEntry) -> None:
        """A tied tensor may be stored under each of its names if the values are equal."""
        a, b = (whole_tensor(MappedFile(entry.file), entry).reshape(-1) for entry in (first, second))
        if first.dtype != second.dtype or not torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
            self.problems.add(
                "tied tensors with different values",
                f"{first.name} and {second.name}",
                "set tie_word_embeddings: false in the model's config, or remove one from the checkpoint",
            )

    def _leave_out(self, name: str) -> None:
        known = {name, name if self.names is None else self.names.renamed.get(name, name)}
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in self.allow_extra for name in known):
            self.result.extra.append(name)
            return
        if any(re.search(pattern, name) for pattern in self.model.ignored for name in known):
            return
        hint = "give the checkpoint of this model's config; in Python, load_weights(allow_extra=...) leaves them out"
        self.problems.add("tensors that the model does not have", name, hint)

    def _check_filled(self) -> None:
        names: dict[str, list[str]] = defaultdict(list)
        for name, target in self.model.targets.items():
            names[target.name].append(name)
        for name, aliases in names.items():
            target = self.model.targets[name]
            if name in self.damaged:
                continue
            if name in self.filled:
                part, whole = self.filled[name], math.prod(target.shape)
                if part != whole and not self.explained:
                    item = f"{name}: {part} of {whole} elements"
                    self.problems.add("parameters filled partly", item, "give the whole checkpoint")
                continue
            if any(fnmatch.fnmatchcase(alias, pattern) for alias in aliases for pattern in self.allow_missing) or any(
                re.search(pattern, name) for pattern in self.model.optional
            ):
                self.result.missing.append(name)
                continue
            hint = "give the whole checkpoint; in Python, load_weights(allow_missing=...) initializes them randomly"
            self.problems.add("parameters that the checkpoint does not have", self._describe(target), hint)

    def _describe(self, target: TensorSpec) -> str:
        """A tensor of the model, with its source keys if they differ."""
        item = f"{target.name} {list(target.shape)}"
        stored = [target.name] if self.names is None else self.names.source_keys_of(target.name)
        return item if stored == [target.name] else f"{item} (in the checkpoint: {', '.join(stored)})"


def _under_model_names(
    entries: Mapping[str, TensorEntry], model: ModelTensors, converters: Sequence[Converter]
) -> list[_Named]:
    """The tensors by name, with the base model's prefix of the model unless only the other name has a converter."""
    renamed = model.names_in_model(entries)

    def has_converter(name: str) -> bool:
        return any(converter.can_handle(name) for converter in converters)

    return [
        (name if has_converter(name) and not has_converter(renamed[name]) else renamed[name], entry)
        for name, entry in entries.items()
    ]


def _assign(entries: Sequence[_Named], converters: Sequence[Converter]) -> tuple[list[list[_Named]], list[_Named]]:
    """The tensors that each converter handles, and the remaining ones."""
    owned: list[list[_Named]] = [[] for _ in converters]
    plain: list[_Named] = []
    for name, entry in entries:
        owner = next((i for i, converter in enumerate(converters) if converter.can_handle(name)), None)
        (plain if owner is None else owned[owner]).append((name, entry))
    return owned, plain
