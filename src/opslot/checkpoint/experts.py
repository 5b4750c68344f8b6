"""The three layouts in which checkpoints hold a mixture's experts, and the converter between them.

Transformers' models hold `<experts>.gate_up_proj` [E, 2I, H] and `<experts>.down_proj` [E, H, I] (E experts,
I intermediate size, H hidden size). A checkpoint holds
- "per_expert": `<experts>.<e>.gate_proj.weight` [I, H], `.up_proj.weight` [I, H], `.down_proj.weight` [H, I];
- "stacked": the model's own names and shapes;
- "transposed": the model's own names, with the last two dims swapped: [E, H, 2I] and [E, I, H].
Which one is read from the tensors, never from the model's family: families were copied from each other with
the layouts mixed up.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from opslot._base.errors import CheckpointError, ConfigError
from opslot.checkpoint._report import Problems, listed
from opslot.checkpoint.converter import Shapes
from opslot.checkpoint.model_tensors import tensors_of
from opslot.checkpoint.tensor_slice import TensorSlice, copy_overlap, full_region, volume

LAYOUTS = ("per_expert", "stacked", "transposed")

_STACKED = re.compile(r"(?P<experts>(?:.*\.)?experts)\.(?P<tensor>gate_up_proj|down_proj)")
_SPLIT = re.compile(
    r"(?P<experts>(?:.*\.)?experts)\.(?P<expert>\d+)\.(?P<projection>gate_proj|up_proj|down_proj)\.weight"
)
_STACKED_NAME = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "down_proj": "down_proj"}


def check_layout(layout: str | None) -> None:
    """Raises: ConfigError when `layout` is neither None nor one of `LAYOUTS`."""
    if layout is not None and layout not in LAYOUTS:
        raise ConfigError(f"expert layout {layout!r} is unknown; use one of {', '.join(LAYOUTS)}")


def is_expert_tensor(name: str) -> bool:
    """Whether `name` is one that experts with gate and up weights in one tensor have."""
    return _STACKED.fullmatch(name) is not None


def stacked_name(projection: str) -> str:
    """The tensor that holds `projection` ("gate_proj", "up_proj" or "down_proj") of all experts, where gate and up are
    one."""
    return _STACKED_NAME[projection]


def family_of(name: str) -> str:
    """`name` with its layer numbers left out: tensors that one writer wrote the same way."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def expert_targets(shapes: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
    """Of a model's tensors, the expert tensors in the [E, 2I, H], [E, H, I] form, by name.

    Experts of another form (transposed in the model itself, as gpt_oss has them) are left out: they need no
    converter.
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

    Experts that are stored one by one are as many in each layer as in the one that holds most, and `at_least` so
    many: which of them are absent is for the plan to find. A pair of stacked tensors determines the layout: [E, a, b]
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
    """The checkpoint tensors, with their places, that make up expert tensor `target` of `shape` in `layout`."""
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
        targets: the model's expert tensors, by name, with their whole shapes (not a rank's part).
        layout: the checkpoint's layout; None finds it from names and shapes. Needed only where a stacked
            checkpoint is square in both tensors that a family of layers holds, so that direct and transposed
            look the same.

    Raises:
        ConfigError: unknown layout.
    """

    def __init__(self, targets: Mapping[str, Sequence[int]], layout: str | None = None) -> None:
        check_layout(layout)
        self.targets = {name: tuple(shape) for name, shape in targets.items()}
        self.layouts: dict[str, str] = {}
        self._layout = layout
        self._open: dict[str, tuple[Tensor, dict[str, int]]] = {}

    @classmethod
    def for_model(cls, model: torch.nn.Module, layout: str | None = None) -> ExpertTensorConverter:
        """The converter of every expert tensor that `model` has; for a model without experts it handles nothing."""
        return cls(expert_targets({name: tensor.shape for name, tensor in tensors_of(model).items()}), layout)

    def target_of(self, name: str) -> str | None:
        """The model's tensor that checkpoint tensor `name` belongs to; None when it is not an expert tensor."""
        match = _SPLIT.fullmatch(name)
        if match is None:
            return name if name in self.targets else None
        holders = (
            f"{match['experts']}.{tensor}" for tensor in (_STACKED_NAME[match["projection"]], match["projection"])
        )
        return next((holder for holder in holders if holder in self.targets), None)

    def can_handle(self, name: str) -> bool:
        """Whether `name` is an expert's, or all experts', tensor of this model."""
        return self.target_of(name) is not None

    def inspect(self, shapes: Shapes) -> None:
        """Find the layout of each family of expert tensors, here `layouts`.

        Raises:
            CheckpointError: one family in two layouts, another layout than the one asked for, or shapes that
                leave it open.
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
        for family in seen.keys() | square.keys():
            found = sorted(seen[family])
            if len(found) > 1:
                examples = ", ".join(f"{layout} ({seen[family][layout][0]})" for layout in found)
                problems.add("mixed layouts", f"{family}: {examples}", "keep the files of one save")
            elif not found and self._layout is None:
                example = square[family][0]
                problems.add(
                    "shapes that fit both directions",
                    f"{example} {list(shapes[example])}",
                    'give layout="stacked" or "transposed"',
                )
            elif found and self._layout not in (None, found[0]):
                problems.add(
                    "another layout than asked for", f"{family}: {found[0]}, not {self._layout}", "leave layout out"
                )
            self.layouts[family] = found[0] if found else str(self._layout)
        problems.raise_if_any()

    def _readings(self, name: str, shape: tuple[int, ...]) -> list[str]:
        """The layouts as which a tensor can be read; none when it is misshapen."""
        if _SPLIT.fullmatch(name):
            return ["per_expert"]
        wanted = self.targets[name]
        fits = {"stacked": wanted, "transposed": (wanted[0], wanted[2], wanted[1])}
        return [layout for layout, stored in fits.items() if stored == tuple(shape)]

    def slice_of(self, name: str, shape: tuple[int, ...]) -> TensorSlice:
        """Where tensor `name` of `shape` goes; the layout is the one that `inspect` found, else the one its
        shape tells.

        Raises:
            CheckpointError: an expert that the model lacks, a tensor of no expert, or a lone square tensor whose
                direction nothing tells.
        """
        target = self.target_of(name)
        if target is None:
            raise CheckpointError(f"{name} is not an expert tensor of this model; ask can_handle first")
        wanted, split = self.targets[target], _SPLIT.fullmatch(name)
        if split:
            if int(split["expert"]) >= wanted[0]:
                raise CheckpointError(f"{name}: the model has {wanted[0]} experts, counted from 0")
            return _expert_slice(target, wanted, int(split["expert"]), split["projection"])
        layout = self._layout or self.layouts.get(family_of(target.rpartition(".")[0]))
        readings = self._readings(name, shape)
        if layout is None and len(readings) > 1:
            raise CheckpointError(
                f"{name} {list(shape)} is square, so it may be direct or transposed; "
                'give layout="stacked" or "transposed"'
            )
        layout = layout or (readings[0] if readings else "stacked")
        return TensorSlice.whole(target, wanted, transposed=layout == "transposed")

    def lacking(self, names: Iterable[str]) -> list[str]:
        """The tensors of single experts that are absent although others of their target are there."""
        present = set(names)
        touched = {target for name in present if _SPLIT.fullmatch(name) and (target := self.target_of(name))}
        return [
            name
            for target in sorted(touched)
            for name, _ in split_target(target, self.targets[target], "per_expert")
            if name not in present
        ]

    def missing(self, names: Iterable[str]) -> list[str]:
        """The experts' projections that are absent although others of their target are there, by layer and expert."""
        lacks: dict[tuple[str, int], list[str]] = defaultdict(list)
        for name in self.lacking(names):
            if split := _SPLIT.fullmatch(name):
                lacks[split["experts"], int(split["expert"])].append(split["projection"])
        order = list(_STACKED_NAME).index
        return [
            f"{experts}: expert {expert} lacks {', '.join(sorted(projections, key=order))}"
            for (experts, expert), projections in sorted(lacks.items())
        ]

    def convert(self, name: str, tensor: Tensor) -> list[tuple[str, Tensor]] | None:
        """The target that `tensor` completes, as one (name, tensor) pair; None while others of its parts are
        missing.

        Raises:
            CheckpointError: wrong shape, an expert the model lacks, a tensor given twice, or a lone square
                tensor.
        """
        part = self.slice_of(name, tuple(tensor.shape))
        if tuple(tensor.shape) != part.shape:
            raise CheckpointError(
                f"{name} has shape {list(tensor.shape)}, the model's {part.target} needs {list(part.shape)}"
            )
        wanted = self.targets[part.target]
        if _SPLIT.fullmatch(name) is None:
            return [(part.target, part.as_region(tensor))]
        if part.target not in self._open:
            self._open[part.target] = (tensor.new_empty(wanted), {})
        buffer, arrived = self._open[part.target]
        if name in arrived:
            raise CheckpointError(f"{name} came twice; keep the shards of one save only")
        if tensor.dtype != buffer.dtype:
            # Whichever came first, no expert loses digits.
            buffer = buffer.to(torch.promote_types(tensor.dtype, buffer.dtype))
            self._open[part.target] = buffer, arrived
        copy_overlap(buffer, full_region(wanted), tensor, part)
        arrived[name] = volume(part.region)
        if sum(arrived.values()) < buffer.numel():
            return None
        del self._open[part.target]
        return [(part.target, buffer)]

    def finalize(self) -> list[tuple[str, Tensor]]:
        """Nothing is left to hand out after whole layers.

        Raises:
            CheckpointError: experts that lack projections, each named.
        """
        names = [name for _, arrived in self._open.values() for name in arrived]
        open_targets = ExpertTensorConverter({target: self.targets[target] for target in self._open})
        lacking = open_targets.missing(names)
        if lacking:
            raise CheckpointError(
                f"the checkpoint's experts are incomplete:\n{listed(lacking)}", hint="add the missing shards"
            )
        return []
