"""The parts of a checkpoint that its model is built without: what loading skips and an export can keep."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opslot._base.errors import CheckpointError
from opslot.checkpoint.adapters import without_wrapper
from opslot.checkpoint.folder import read_config, read_folder
from opslot.checkpoint.safetensors_file import TensorEntry
from opslot.distributed import is_first_rank
from opslot.slots.protocol import sub_model


@dataclass(frozen=True)
class ExcludedParts:
    """What an export adds to a model that is built without some of its parts.

    Attributes:
        entries: their tensors.
        config: the model's config with these parts; None for its own.
        files: files of the checkpoint that Transformers needs beside its weights.
    """

    entries: Sequence[TensorEntry] = ()
    config: Any = None
    files: Sequence[Path] = ()

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
            return cls()
        folder = Path(source).expanduser()
        files = [folder / name for name in declared.files if (folder / name).is_file()]
        if not keep:
            return cls(files=files)
        prefixes = tuple(f"{part}." for part in declared.excluded)
        entries = [entry for name, entry in read_folder(folder).items() if name.startswith(prefixes)]
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
        return cls(entries, config, files)

    def copy_files(self, folder: Path) -> None:
        """Copy `files` to an export; rank 0 does."""
        for file in self.files if is_first_rank() else ():
            shutil.copyfile(file, folder / file.name)
