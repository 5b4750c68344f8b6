"""What loading a checkpoint into a model will do, decided from headers before anything is written."""

from __future__ import annotations

import copy
import fnmatch
import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from opslot._base.errors import CheckpointError
from opslot.checkpoint._report import Problems
from opslot.checkpoint.converter import CheckpointTensorConverter, PlacingConverter
from opslot.checkpoint.experts import ExpertTensorConverter
from opslot.checkpoint.hub_names import ConvertedTensors, HubNames, HubTensorConverter
from opslot.checkpoint.model_tensors import ModelTensors, Target
from opslot.checkpoint.placement import Placement, is_numeric_cast, volume
from opslot.checkpoint.safetensors_file import MappedFile, TensorEntry


@dataclass(frozen=True, slots=True)
class Piece:
    """One checkpoint tensor and the place it goes to."""

    entry: TensorEntry
    placement: Placement


@dataclass(frozen=True)
class Stream:
    """Checkpoint tensors that a collecting converter takes, in order, by the model's name for them."""

    converter: CheckpointTensorConverter
    entries: list[tuple[str, TensorEntry]]


@dataclass
class LoadPlan:
    """What to copy where.

    Attributes:
        pieces: tensors copied to their place.
        streams: tensors that go through a converter that collects.
        missing: model tensors that nothing fills and that may stay so.
        extra: checkpoint tensors that are left out.
        layouts: layout of each family of expert tensors.
    """

    pieces: list[Piece] = field(default_factory=list)
    streams: list[Stream] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    layouts: dict[str, str] = field(default_factory=dict)


def make_plan(
    entries: Mapping[str, TensorEntry],
    model: ModelTensors,
    converters: Sequence[CheckpointTensorConverter],
    problems: Problems,
    *,
    allow_missing: Collection[str] = (),
    allow_extra: Collection[str] = (),
    names: HubNames | None = None,
) -> LoadPlan:
    """Give every tensor of the checkpoint its place and check that every tensor of the model is filled
    exactly once.

    Args:
        entries: the checkpoint's tensors.
        model: what the model needs.
        converters: asked in order; the first that can handle a tensor gets it.
        problems: what is found wrong is filed here; the plan must not be carried out when there is any.
        allow_missing, allow_extra: name patterns (`fnmatch`) of the model's and the checkpoint's tensors that
            may stay alone.
        names: what the checkpoint's names are in the model where Transformers says; its converters see the checkpoint's
            own. None: they are the model's, up to a base model's prefix.
    """
    planner = _Planner(model, problems, allow_missing, allow_extra, names)
    return planner.plan(model.in_model_terms(entries) if names is None else dict(entries), converters)


class _Planner:
    def __init__(
        self,
        model: ModelTensors,
        problems: Problems,
        allow_missing: Collection[str],
        allow_extra: Collection[str],
        names: HubNames | None,
    ) -> None:
        self.model = model
        self.problems = problems
        self.names = names
        self.allow_missing, self.allow_extra = allow_missing, allow_extra
        self.result = LoadPlan()
        self.filled: dict[str, int] = defaultdict(int)
        self.taken: dict[tuple[str, tuple[tuple[int, int], ...]], TensorEntry] = {}
        self.handed: set[str] = set()
        self.damaged: set[str] = set()
        self.explained = False

    def plan(self, entries: dict[str, TensorEntry], converters: Sequence[CheckpointTensorConverter]) -> LoadPlan:
        owned, plain = _share_out(entries, converters)
        for converter, names in zip(converters, owned):
            mine = {name: entries[name] for name in names}
            if isinstance(converter, PlacingConverter):
                self._place(converter, mine)
            elif mine:
                self._rehearse(converter, mine)
        for name in plain:
            entry, target = entries[name], self.model.targets.get(name)
            if target is not None:
                self._put(name, entry, Placement.whole(target.name, target.shape))
            else:
                self._leave_out(name)
        self._check_filled()
        return self.result

    def _place(self, converter: PlacingConverter, mine: dict[str, TensorEntry]) -> None:
        try:
            converter.inspect({name: entry.shape for name, entry in mine.items()})
        except CheckpointError as error:
            self.problems.add("layout", str(error), "see above")
            self.damaged.update(self.model.targets)
            return
        if isinstance(converter, ExpertTensorConverter | HubTensorConverter):
            self.result.layouts |= converter.layouts
        for name, entry in mine.items():
            try:
                self._put(name, entry, converter.place(name, entry.shape))
            except CheckpointError as error:
                self.problems.add("tensors without a place", str(error), "give the checkpoint of this model's config")
        for item in converter.missing(mine):
            self.explained = True
            self.problems.add("incomplete experts", item, "add the missing shards or tensors")

    def _rehearse(self, converter: CheckpointTensorConverter, mine: dict[str, TensorEntry]) -> None:
        """Run a copy of a collecting converter on tensors without memory, to learn what it will hand out."""
        rehearsal = copy.deepcopy(converter)
        handed: list[tuple[str, Tensor]] = []
        try:
            for name, entry in mine.items():
                at = f"convert({name!r})"
                handed += rehearsal.convert(name, torch.empty(entry.shape, dtype=entry.dtype, device="meta")) or ()
            at = "finalize"
            handed += rehearsal.finalize()
        except CheckpointError as error:
            self.problems.add("tensors that a converter refuses", str(error), "see above")
            if isinstance(converter, ConvertedTensors):
                self.damaged.update(self.model.targets[name].name for name in converter.targets)
            return
        except Exception as error:
            raise CheckpointError(
                f"{type(converter).__name__}.{at} failed on tensors without values, which show what it will hand out",
                found=f"{type(error).__name__}: {error}",
                hint="have it decide by names and shapes, and return (name, tensor) pairs",
            ) from error
        source = next(iter(mine.values()))
        for name, tensor in handed:
            target = self.model.targets.get(name)
            if target is None:
                self._leave_out(name)
                continue
            self.handed.add(target.name)
            entry = TensorEntry(name, source.file, tensor.dtype, tuple(tensor.shape), 0, 0)
            self._account(name, entry, Placement.whole(target.name, target.shape))
        self.result.streams.append(Stream(converter, list(mine.items())))

    def _put(self, name: str, entry: TensorEntry, placement: Placement) -> None:
        if self._account(name, entry, placement):
            self.result.pieces.append(Piece(entry, placement))

    def _account(self, name: str, entry: TensorEntry, placement: Placement) -> bool:
        """Book the part of the target that `entry` fills; False if it does not fit or is filled already."""
        target = self.model.targets[placement.target]
        if entry.shape != placement.shape:
            item = f"{name}: found {list(entry.shape)}, expected {list(placement.shape)}"
            self.problems.add("misshapen tensors", item, "give the checkpoint of this model's config")
            self.damaged.add(target.name)
            return False
        if not is_numeric_cast(entry.dtype, target.dtype):
            item = f"{name}: found {entry.dtype}, the model holds {target.dtype}"
            self.problems.add(
                "dtypes that cannot be converted", item, "dequantise the checkpoint, or load it with its own library"
            )
            self.damaged.add(target.name)
            return False
        key = target.name, tuple((r.start, r.stop) for r in placement.region)
        if key in self.taken and target.name in self.handed:
            todo = "have each parameter come once, and tied ones under one name"
            self.problems.add("parameters that a converter and another source fill", name, todo)
            return False
        if key in self.taken:
            self._check_same(name, self.taken[key], entry)
            return False
        self.taken[key] = entry
        self.filled[target.name] += volume(placement.region)
        return True

    def _check_same(self, name: str, first: TensorEntry, second: TensorEntry) -> None:
        """A tied tensor may be stored under each of its names, with one value."""
        a, b = (MappedFile(entry.file).view(entry).reshape(-1) for entry in (first, second))
        if first.dtype != second.dtype or not torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
            self.problems.add(
                "tied tensors with different values",
                f"{first.name} and {name}",
                "set tie_word_embeddings: false in the model's config, or remove one from the checkpoint",
            )

    def _leave_out(self, name: str) -> None:
        known = {name, name if self.names is None else self.names.renamed.get(name, name)}
        if any(re.search(pattern, name) for pattern in self.model.ignored for name in known):
            return
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in self.allow_extra for name in known):
            self.result.extra.append(name)
            return
        todo = "give the checkpoint of this model's config, or name them in allow_extra"
        self.problems.add("tensors that no parameter takes", name, todo)

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
                    self.problems.add("parameters filled in part", item, "give the whole checkpoint")
                continue
            if any(fnmatch.fnmatchcase(alias, pattern) for alias in aliases for pattern in self.allow_missing) or any(
                re.search(pattern, name) for pattern in self.model.optional
            ):
                self.result.missing.append(name)
                continue
            todo = "give the whole checkpoint, or name them in allow_missing to initialise them anew"
            self.problems.add("parameters that no tensor fills", self._in_words(target), todo)

    def _in_words(self, target: Target) -> str:
        """A tensor of the model, and what it is called in the checkpoint where that is something else."""
        item = f"{target.name} {list(target.shape)}"
        stored = [target.name] if self.names is None else self.names.spell(target.name)
        return item if stored == [target.name] else f"{item} (in the checkpoint: {', '.join(stored)})"


def _share_out(
    names: Iterable[str], converters: Sequence[CheckpointTensorConverter]
) -> tuple[list[list[str]], list[str]]:
    """The names that each converter handles, and those that none does."""
    owned: list[list[str]] = [[] for _ in converters]
    plain: list[str] = []
    for name in names:
        owner = next((i for i, converter in enumerate(converters) if converter.can_handle(name)), None)
        (plain if owner is None else owned[owner]).append(name)
    return owned, plain
