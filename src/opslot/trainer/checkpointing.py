"""The checkpoints of a run: when each gets which name, and which are removed.

`opslot.checkpoint.training_state` writes and reads them.
"""

from __future__ import annotations

import re
from pathlib import Path

from opslot._base.errors import CheckpointError
from opslot.checkpoint.training_state import is_complete, read_state

CHECKPOINTS = "checkpoints"
_NAME = re.compile(r"step_(\d{8}|[1-9]\d{8,})")


def checkpoint_name(step: int) -> str:
    """Folder of the checkpoint taken after `step`."""
    return f"step_{step:08d}"


def step_of(folder: Path) -> int:
    """The step in the name of a checkpoint; -1 if opslot does not write such a name."""
    match = _NAME.fullmatch(folder.name)
    return int(match[1]) if match else -1


def find_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints of the run below `folder`, oldest first; copies under other names are not among them."""
    return [path for path in _named(folder) if is_complete(path)]


def damaged_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints of the run below `folder` that lack files, oldest first."""
    return [path for path in _named(folder) if not is_complete(path)]


def newer_checkpoints(checkpoint: Path) -> list[Path]:
    """Checkpoints of the same run after `checkpoint`, which may have any name; none if it cannot be read."""
    try:
        step = read_state(checkpoint)[0]["step"]
    except CheckpointError:
        step = step_of(checkpoint)
    return [path for path in find_checkpoints(checkpoint.parent) if 0 <= step < step_of(path)]


def _named(folder: Path) -> list[Path]:
    paths = folder.iterdir() if folder.is_dir() else ()
    return sorted((path for path in paths if step_of(path) >= 0), key=step_of)
