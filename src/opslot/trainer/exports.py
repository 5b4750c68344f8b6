"""The exports in a run's folder, and exports.json, which has the step and the files of each."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from opslot._base.files import read_json_object, write_json

EXPORTS_FILE = "exports.json"


def exported_step(output_dir: Path, name: str) -> int | None:
    """The step of the model in an export; None without such an export, or where it is unknown."""
    recorded = _recorded(output_dir).get(name)
    return recorded["step"] if recorded is not None and (output_dir / name).is_dir() else None


def export_folder(output_dir: Path, name: str) -> Path:
    """The folder of an export, also where the user made `name` a link to another disk."""
    return (output_dir / name).resolve()


def place_export(output_dir: Path, name: str, new: Path, step: int) -> None:
    """Give the folder `new` of the model after `step` the name `name`, with the user's files of the old export.

    A kill at any time leaves the old export, there or beside it, or the new one; the next export finds the user's
    files.
    """
    final, recorded = export_folder(output_dir, name), _recorded(output_dir)
    old = final.with_name(f".discarded-{final.name}")
    # An earlier run may have exported adapters, whose config Transformers would load beside the weights of this one.
    ours = set(recorded[name]["files"]) if name in recorded else set()
    own = sorted(file.name for file in new.iterdir())
    if final.is_dir():
        _discard(old, final, ours)
        final.rename(old)
    new.rename(final)
    _discard(old, final, ours)
    write_json(output_dir / EXPORTS_FILE, {**recorded, name: {"step": step, "files": own}})


def _discard(old: Path, final: Path, ours: set[str]) -> None:
    """Remove the export `old`, after its files of the user, neither weights nor in `ours`, are moved to `final`."""
    for file in old.iterdir() if old.is_dir() else ():
        is_weights = file.name.endswith((".safetensors", ".safetensors.index.json"))
        if not is_weights and file.name not in ours and not (final / file.name).exists():
            shutil.move(file, final / file.name)
    shutil.rmtree(old, ignore_errors=True)


def _recorded(output_dir: Path) -> dict[str, dict[str, Any]]:
    """The entries of exports.json that are valid; a kill or an edit may have left others."""
    return {
        name: entry
        for name, entry in read_json_object(output_dir / EXPORTS_FILE).items()
        if isinstance(entry, dict) and type(entry.get("step")) is int and isinstance(entry.get("files"), list)
    }
