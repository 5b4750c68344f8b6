"""Converting a checkpoint folder between the experts' layouts, offline and without a model."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path

import torch
from torch import Tensor

from opslot._base.errors import CheckpointError
from opslot._base.logging import get_logger
from opslot.checkpoint._report import Problems
from opslot.checkpoint.experts import ExpertTensorConverter, check_layout, expert_targets_of_checkpoint
from opslot.checkpoint.folder import INDEX, read_folder, staged_folder
from opslot.checkpoint.model_tensors import ModelTensors, Target
from opslot.checkpoint.placement import Placement, copy_overlap, extent, intersect
from opslot.checkpoint.plan import Piece, make_plan
from opslot.checkpoint.safetensors_file import MappedFile, TensorEntry
from opslot.checkpoint.save import outputs_for, parse_size, shard_outputs, write_shards

logger = get_logger(__name__)

_OPEN_FILES = 4
# Where Transformers keeps the templates beside the default one.
_TEMPLATES = "additional_chat_templates"
# What families call it.
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


def convert_folder(
    source: str | Path, destination: str | Path, *, layout: str, max_shard_size: int | str = "5GB"
) -> Path:
    """Write the checkpoint in `source` to `destination` with its experts in `layout`; everything else is
    kept.

    Tensors outside the experts are copied, and all other files beside them, such as config.json and the tokenizer's;
    folders are not, but for additional chat templates, nor safetensors that are no part of the checkpoint, and a log
    line says so. The destination appears whole or not at all; memory is one tensor of the result and the mapped pages
    of a few shards.

    Args:
        source: a Hugging Face checkpoint of any layout.
        destination: a folder that does not exist yet or is empty.
        layout: "per_expert", "stacked" or "transposed".
        max_shard_size: bytes of a file, or e.g. "5GB".

    Returns:
        The destination.

    Raises:
        CheckpointError: a source that is missing, corrupt, incomplete or of mixed layouts, or has no experts;
            a destination that holds something or cannot be written.
        ConfigError: unknown layout or size.
    """
    source, destination = Path(source), Path(destination)
    check_layout(layout)
    max_bytes = parse_size(max_shard_size)
    entries = read_folder(source)
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise CheckpointError(f"{str(destination)!r} exists and is not an empty folder; give another destination")
    shapes = {name: entry.shape for name, entry in entries.items()}
    experts = expert_targets_of_checkpoint(shapes, at_least=_configured_experts(source))
    if not experts:
        raise CheckpointError(f"checkpoint {str(source)!r} holds no experts, so there is no layout to convert")
    model, pieces = _plan(source, entries, experts)
    described = {name: (target.dtype, target.shape) for name, target in model.targets.items()}
    shards = shard_outputs(outputs_for(described, experts, layout), max_bytes)
    with staged_folder(destination, sum(entry.nbytes for entry in entries.values())) as stage:
        write_shards(stage, shards, _Reader(model, pieces))
        _copy_companions(source, stage, {entry.file.name for entry in entries.values()})
    logger.info("converted %s to %s in %s", source, layout, destination)
    return destination


def _copy_companions(source: Path, destination: Path, shards: set[str]) -> None:
    left_out = []
    for path in sorted(source.iterdir()):
        if path.is_file() and path.suffix != ".safetensors":
            if path.name != INDEX:
                shutil.copy2(path, destination / path.name)
        elif path.name == _TEMPLATES and path.is_dir():
            shutil.copytree(path, destination / path.name)
        elif path.name not in shards:
            left_out.append(path.name)
    if left_out:
        logger.info("left out, as no part of the checkpoint: %s", ", ".join(left_out))


def _configured_experts(source: Path) -> int:
    """Experts of a layer, as config.json says; 0 when it says nothing."""
    try:
        config = json.loads((source / "config.json").read_bytes())
    except (OSError, ValueError):
        return 0
    if not isinstance(config, dict):
        return 0
    sections = [part for part in (config, config.get("text_config")) if isinstance(part, dict)]
    counts = [section.get(key) for section in sections for key in _COUNTS]
    return max((count for count in counts if isinstance(count, int)), default=0)


def _plan(
    source: Path, entries: dict[str, TensorEntry], experts: dict[str, tuple[int, ...]]
) -> tuple[ModelTensors, dict[str, list[Piece]]]:
    """The tensors that a model of this checkpoint has, and the pieces of each; checked for completeness."""
    problems = Problems(f"checkpoint {str(source)!r} cannot be converted")
    converter = ExpertTensorConverter(experts)
    targets: dict[str, Target] = {}
    for name, entry in entries.items():
        target = converter.target_of(name)
        if target is None:
            targets[name] = Target(name, entry.shape, entry.dtype)
            continue
        first = targets.setdefault(target, Target(target, experts[target], entry.dtype))
        if first.dtype != entry.dtype:
            item = f"{name}: {entry.dtype}, others of {target}: {first.dtype}"
            problems.add("experts of several dtypes", item, "save them in one dtype first")
    model = ModelTensors(targets)
    plan = make_plan(entries, model, [converter], problems)
    problems.raise_if_any()
    pieces: dict[str, list[Piece]] = {}
    for piece in plan.pieces:
        pieces.setdefault(piece.placement.target, []).append(piece)
    return model, pieces


class _Reader:
    """Assembles any region of a model's tensor from the pieces that the source holds of it."""

    def __init__(self, model: ModelTensors, pieces: dict[str, list[Piece]]) -> None:
        self._model = model
        self._pieces = pieces
        self._open = functools.lru_cache(maxsize=_OPEN_FILES)(MappedFile)

    def __call__(self, placement: Placement) -> Tensor:
        target = self._model.targets[placement.target]
        region = torch.empty(extent(placement.region), dtype=target.dtype)
        for piece in self._pieces[placement.target]:
            if intersect(placement.region, piece.placement.region) is not None:
                stored = self._open(piece.entry.file).view(piece.entry)
                copy_overlap(region, placement.region, stored, piece.placement)
        return placement.as_stored(region)
