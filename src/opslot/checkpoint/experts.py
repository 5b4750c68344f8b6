"""The three layouts of experts in checkpoints, and the converter between them.

Transformers' models hold `<experts>.gate_up_proj` [E, 2I, H] and `<experts>.down_proj` [E, H, I] (E experts,
I intermediate size, H hidden size). A checkpoint holds
- "per_expert": `<experts>.<e>.gate_proj.weight` [I, H], `.up_proj.weight` [I, H], `.down_proj.weight` [H, I];
- "stacked": the model's own names and shapes;
- "transposed": the model's own names, with the last two dims swapped: [E, H, 2I] and [E, I, H].
The layout is detected from the tensors, not from the architecture: checkpoints of one architecture differ.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch

from opslot._base.errors import CheckpointError, ConfigError
from opslot.checkpoint._report import Problems
from opslot.checkpoint.converter import Shapes
from opslot.checkpoint.model_tensors import stored_specs
from opslot.checkpoint.tensor_slice import TensorSlice

LAYOUTS = ("per_expert", "stacked", "transposed")

_STACKED = re.compile(r"(?P<experts>(?:.*\.)?experts)\.(?P<tensor>gate_up_proj|down_proj)")
_SPLIT = re.compile(
    r"(?P<experts>(?:.*\.)?experts)\.(?P<expert>\d+)\.(?P<projection>gate_proj|up_proj|down_proj)\.weight"
)
# The stacked tensor that holds a projection of all experts.
STACKED_NAME = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "down_proj": "down_proj"}


def check_layout(layout: str | None) -> None:
    """Raises: ConfigError when `layout` is neither None nor one of `LAYOUTS`."""
    if layout is not None and layout not in LAYOUTS:
        raise ConfigError(f"expert layout {layout!r} is unknown", hint=f"use one of {', '.join(LAYOUTS)}")


def is_expert_tensor(name: str) -> bool:
    """Whether `name` is a stacked expert tensor."""
    return _STACKED.fullmatch(name) is not None


def family_of(name: str) -> str:
    """`name` with layer numbers replaced by `*`."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def expert_targets(shapes: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
    """Of a model's tensors, the expert tensors in the [E, 2I, H], [E, H, I] form, by name.

    Experts that are transposed in the model itself, as in gpt_oss, are left out: they need no converter.
    """
    targets: dict[str, tuple[int, ...]] = {}
    for name in shapes:
        match = _STACKED.fullmatch(name)
        if match is None or match["tensor"] != "gate_up_proj":
            continue
        down_name = f"{match['experts']}.down_proj"
        gate_up, down = tuple(shapes[name]), tuple(shapes.get(down_name, ()))
        if len(gate_up) == len(down) == 3 and down == (gate_up[0], gate_up[2], gate_up[1] // 2):
            targets[name], targets[down_name] = gate_up, down
    return targets


def expert_targets_of_checkpoint(shapes: Shapes, at_least: int = 0) -> dict[str, tuple[int, ...]]:
    """The expert tensors that a model of this checkpoint has, in the [E, 2I, H], [E, H, I] form, whatever the
    checkpoint's layout.

    Per-expert checkpoints are assumed to have as many experts in each layer as in the layer with the most, and at least
    `at_least`; `map_tensors` reports the missing ones. A pair of stacked tensors determines the layout: [E, a, b]
    and [E, c, d] are direct when (c, d) = (b, a/2), transposed when (c, d) = (b/2, a), and cannot be both.
    """
    stacked: dict[str, tuple[int, ...]] = {}
    experts: dict[str, int] = defaultdict(int)
    for name, shape in shapes.items():
        split = _SPLIT.fullmatch(name)
        if split is not None and len(shape) == 2:
            experts[split["experts"]] = max(experts[split["experts"]], int(split["expert"]) + 1)
        elif _STACKED.fullmatch(name) and len(shape) == 3:
            stacked[name] = shape
    swapped = {name: (e, b, a) for name, (e, a, b) in stacked.items()}
    targets = expert_targets(stacked) | expert_targets(swapped)
    most: dict[str, int] = defaultdict(lambda: at_least)
    for prefix, count in experts.items():
        most[family_of(prefix)] = max(most[family_of(prefix)], count)
    for prefix in experts:
        count = most[family_of(prefix)]
        inner, hidden = next(
            (shapes[n] for e in range(count) if (n := f"{prefix}.{e}.gate_proj.weight") in shapes), (0, 0)
        )
        targets[f"{prefix}.gate_up_proj"] = (count, 2 * inner, hidden)
        targets[f"{prefix}.down_proj"] = (count, hidden, inner)
    return targets


def split_target(target: str, shape: Sequence[int], layout: str) -> list[tuple[str, TensorSlice]]:
    """Names and slices of the checkpoint tensors that make up expert tensor `target` of `shape` in `layout`."""
    if layout != "per_expert":
        return [(target, TensorSlice.whole(target, shape, transposed=layout == "transposed"))]
    prefix, _, tensor = target.rpartition(".")
    projections = ["gate_proj", "up_proj"] if tensor == "gate_up_proj" else [tensor]
    return [
        (f"{prefix}.{expert}.{projection}.weight", _expert_slice(target, shape, expert, projection))
        for expert in range(shape[0])
        for projection in projections
    ]


def _expert_slice(target: str, shape: Sequence[int], expert: int, projection: str) -> TensorSlice:
    """One expert's projection in `target`: gate above up in [E, 2I, H], any other alone in [E, rows, columns]."""
    shared = target.endswith("gate_up_proj")
    rows = shape[1] // 2 if shared else shape[1]
    first = rows if shared and projection == "up_proj" else 0
    region = (slice(expert, expert + 1), slice(first, first + rows), slice(0, shape[2]))
    return TensorSlice(target, region, (rows, shape[2]))


class ExpertTensorConverter:
    """Loads experts of any layout into a model's [E, 2I, H] and [E, H, I] tensors.

    Args:
        targets: the model's expert tensors, by name, with their global shapes.
        layout: the checkpoint's layout; None detects it from names and shapes. Needed only if both
            stacked tensors are square, so that stacked and transposed have the same shapes.

    Raises:
        ConfigError: unknown layout.
    """

    def __init__(self, targets: Mapping[str, Sequence[int]], layout: str | None = None) -> None:
        check_layout(layout)
        self.targets = {name: tuple(shape) for name, shape in targets.items()}
        self.layouts: dict[str, str] = {}
        self._layout = layout

    @classmethod
    def for_model(cls, model: torch.nn.Module, layout: str | None = None) -> ExpertTensorConverter:
        """The converter of every expert tensor that `model` has; for a model without experts it handles nothing."""
        return cls(expert_targets({name: spec.shape for name, spec in stored_specs(model).items()}), layout)

    def target_of(self, name: str) -> str | None:
        """The model's tensor that checkpoint tensor `name` belongs to; None when it is not an expert tensor."""
        match = _SPLIT.fullmatch(name)
        if match is None:
            return name if name in self.targets else None
        holders = (
            f"{match['experts']}.{tensor}" for tensor in (STACKED_NAME[match["projection"]], match["projection"])
        )
        return next((holder for holder in holders if holder in self.targets), None)

    def can_handle(self, name: str) -> bool:
        """Whether `name` is an expert tensor of this model, of one expert or stacked."""
        return self.target_of(name) is not None

    def inspect(self, shapes: Shapes) -> None:
        """Detect the layout of each family of expert tensors; sets `layouts`.

        Raises:
            CheckpointError: one family in two layouts, another layout than the given one, or ambiguous shapes.
        """
        seen: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        square: dict[str, list[str]] = defaultdict(list)
        for name, shape in shapes.items():
            target = self.target_of(name)
            if target is None:
                continue
            family = family_of(target.rpartition(".")[0])
            readings = self._readings(name, shape)
            if len(readings) == 1:
                seen[family][readings[0]].append(name)
            elif readings:
                square[family].append(name)
        problems = Problems("the layout of the checkpoint's experts")
        for family in sorted(seen.keys() | square.keys()):
            found = sorted(seen[family])
            if len(found) > 1:
                examples = ", ".join(f"{layout} ({seen[family][layout][0]})" for layout in found)
                problems.add("mixed layouts", f"{family}: {examples}", "keep the files of one save")
            elif not found and self._layout is None:
                example = square[family][0]
                problems.add(
                    "shapes that fit stacked and transposed",
                    f"{example} {list(shapes[example])}",
                    'give layout="stacked" or "transposed"',
                )
            elif found and self._layout not in (None, found[0]):
                problems.add(
                    "another layout than the given one", f"{family}: {found[0]}, not {self._layout}", "remove layout"
                )
            self.layouts[family] = found[0] if found else str(self._layout)
        problems.raise_if_any()

    def _readings(self, name: str, shape: tuple[int, ...]) -> list[str]:
        """The layouts that fit a tensor; none if its shape is wrong."""
        if _SPLIT.fullmatch(name):
            return ["per_expert"]
        wanted = self.targets[name]
        fits = {"stacked": wanted, "transposed": (wanted[0], wanted[2], wanted[1])}
        return [layout for layout, stored in fits.items() if stored == tuple(shape)]

    def slice_of(self, name: str, shape: tuple[int, ...]) -> TensorSlice:
        """The slice that tensor `name` fills, in the layout that `inspect` found.

        Raises:
            CheckpointError: an expert that the model lacks.
        """
        target = self.target_of(name)
        assert target is not None, f"{name} is not an expert tensor of this model"
        wanted, split = self.targets[target], _SPLIT.fullmatch(name)
        if split:
            if int(split["expert"]) >= wanted[0]:
                raise CheckpointError(
                    f"{name}: the model has {wanted[0]} experts, counted from 0",
                    hint="give the checkpoint of this model's config",
                )
            return _expert_slice(target, wanted, int(split["expert"]), split["projection"])
        layout = self.layouts.get(family_of(target.rpartition(".")[0]), "stacked")
        return TensorSlice.whole(target, wanted, transposed=layout == "transposed")

    def lacking(self, names: Iterable[str]) -> list[str]:
        """The missing per-expert tensors of targets of which other tensors are present."""
        present = set(names)
        touched = {target for name in present if _SPLIT.fullmatch(name) and (target := self.target_of(name))}
        return [
            name
            for target in sorted(touched)
            for name, _ in split_target(target, self.targets[target], "per_expert")
            if name not in present
        ]

    def missing(self, names: Iterable[str]) -> list[str]:
        """The missing projections, by layer and expert, of targets of which other tensors are present."""
        lacks: dict[tuple[str, int], list[str]] = defaultdict(list)
        for name in self.lacking(names):
            if split := _SPLIT.fullmatch(name):
                lacks[split["experts"], int(split["expert"])].append(split["projection"])
        order = list(STACKED_NAME).index
        return [
            f"{experts}: expert {expert} lacks {', '.join(sorted(projections, key=order))}"
            for (experts, expert), projections in sorted(lacks.items())
        ]
