"""The parts of a checkpoint that its model is built without: what loading skips and an export can keep."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opslot._base.errors import CheckpointError
from opslot._base.hub import local_model
from opslot._base.logging import get_logger
from opslot.checkpoint.adapters import without_wrapper
from opslot.checkpoint.folder import read_config, read_folder
from opslot.checkpoint.safetensors_file import TensorEntry
from opslot.distributed import is_first_rank
from opslot.slots.protocol import SubModel, sub_model

_logger = get_logger(__name__)


@dataclass(frozen=True)
class ExcludedParts:
    """What an export adds to a model that is built without some of its parts.

    Attributes:
        entries: their tensors.
        config: the model's config with these parts; None for its own.
        files: files of the checkpoint that Transformers needs beside its weights.
        problem: which of them are missing.
    """

    entries: Sequence[TensorEntry] = ()
    config: Any = None
    files: Sequence[Path] = ()
    problem: str | None = None

    @classmethod
    def of(cls, model: Any, source: str | Path | None, keep: bool) -> ExcludedParts:
        """Those of `model`, which was trained from the checkpoint `source`; with `keep` their weights too.

        Raises:
            CheckpointError: weights are to be kept, and there are none.
        """
        model = without_wrapper(model)
        declared = sub_model(type(model))
        if declared is None or source is None:
            if keep:
                name = type(model).__name__
                reason = f"{name} is built with all its parts" if declared is None else "the model has no checkpoint"
                raise CheckpointError(
                    f"there are no excluded weights to keep: {reason}", hint="set keep_excluded=False"
                )
            return cls(problem=None if declared is None else _missing(model, declared, declared.files))
        folder = local_model(source)
        files = [folder / name for name in declared.files if (folder / name).is_file()]
        problem = _missing(model, declared, [name for name in declared.files if folder / name not in files])
        if not keep:
            return cls(files=files, problem=problem)
        entries = _entries(declared, folder)
        if not entries:
            raise CheckpointError(
                f"{folder} has no weights of {' or '.join(declared.excluded)} to keep",
                hint="give the checkpoint that the model was trained from, or set keep_excluded=False",
            )
        config = copy.deepcopy(model.config)
        stored = read_config(folder)
        for name in declared.settings:
            # A setting that the file lacks has its default.
            setattr(config, name, stored.get(name, getattr(type(config)(), name)))
        return cls(entries, config, files, problem)

    def copy_files(self, folder: Path) -> None:
        """Copy `files` to an export, and warn of missing ones; rank 0 does."""
        if not is_first_rank():
            return
        for file in self.files:
            shutil.copyfile(file, folder / file.name)
        if self.problem is not None:
            _logger.warning("%s", self.problem)


def has_excluded_parts(model: Any, source: str | Path) -> bool:
    """Whether the checkpoint `source` has weights that `model` is built without."""
    declared = sub_model(type(without_wrapper(model)))
    return declared is not None and bool(_entries(declared, Path(source).expanduser()))


def _entries(declared: SubModel, folder: Path) -> list[TensorEntry]:
    prefixes = tuple(f"{part}." for part in declared.excluded)
    return [entry for name, entry in read_folder(folder).items() if name.startswith(prefixes)]


def _missing(model: Any, declared: SubModel, names: Sequence[str]) -> str | None:
    if not names:
        return None
    whole, part = (type(m).__name__.removeprefix("FSDP") for m in (model, getattr(model, declared.name)))
    return (
        f"the export has no {', '.join(names)}, which Transformers' {whole}.from_pretrained reads; copy it there from "
        f"the published checkpoint, or load the export with {part}"
    )
