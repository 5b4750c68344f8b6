"""A Hugging Face checkpoint folder: which tensors it has in which file, and replacing one atomically."""

from __future__ import annotations

import errno
import glob
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from opslot._base.errors import CheckpointError
from opslot._base.files import read_json_object, weights_in_other_formats
from opslot.checkpoint._report import Problems
from opslot.checkpoint.safetensors_file import TensorEntry, read_header

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_SIZES = {"GB": 10**9, "MB": 10**6, "KB": 10**3}
_NAME_BYTES = 255


def read_folder(folder: str | Path) -> dict[str, TensorEntry]:
    """Every tensor of the checkpoint in `folder`, by name, from the headers alone.

    Reads model.safetensors.index.json and the shards it names, or model.safetensors.

    Raises:
        CheckpointError: no such folder; no safetensors in it; a shard that is missing, truncated or corrupt
            (all are named); a tensor that the index places in a shard that lacks it, or that two shards hold.
    """
    folder = Path(folder)
    if not os.path.isdir(folder):
        raise CheckpointError(
            f"checkpoint {str(folder)!r} is not a folder", hint=f"give the folder that holds {WEIGHTS} or {INDEX}"
        )
    if (folder / INDEX).is_file():
        weight_map = _weight_map(folder / INDEX)
        if (folder / WEIGHTS).is_file() and WEIGHTS not in weight_map.values():
            raise CheckpointError(
                f"checkpoint {str(folder)!r} holds both {WEIGHTS} and an index of other files, from two saves",
                hint="remove the older",
            )
    elif (folder / WEIGHTS).is_file():
        weight_map = {}
    else:
        raise _no_weights(folder)
    return _read_shards(folder, weight_map)


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a checkpoint; empty if it is missing, not readable or not an object."""
    return read_json_object(folder / "config.json")


def _weight_map(index: Path) -> dict[str, str]:
    """Raises: CheckpointError when `index` is not JSON, or names files that no folder can hold."""
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise _bad_index(index, f"{type(error).__name__}: {error}") from error
    if not isinstance(weight_map, dict):
        raise _bad_index(index, f"weight_map is a {type(weight_map).__name__}")
    for shard in weight_map.values():
        if not isinstance(shard, str) or not _is_file_name(shard):
            raise _bad_index(index, f"{str(shard)[:60]!r} as a file name")
    return weight_map


def _is_file_name(name: str) -> bool:
    return bool(name) and Path(name).name == name and "\0" not in name and len(os.fsencode(name)) <= _NAME_BYTES


def _bad_index(index: Path, found: str) -> CheckpointError:
    return CheckpointError(
        f"{index} is not a valid safetensors index",
        found=found,
        hint='it should hold {"weight_map": {tensor name: file name}}; copy or download it again',
    )


def _no_weights(folder: Path) -> CheckpointError:
    shards = sorted(folder.glob("model-*-of-*.safetensors"))
    if shards:
        found, hint = f"{len(shards)} shards, e.g. {shards[0].name}", "add the index that came with them"
    else:
        found, hint = weights_in_other_formats(sorted(path.name for path in folder.iterdir()), str(folder))
    return CheckpointError(f"checkpoint {str(folder)!r} holds neither {WEIGHTS} nor {INDEX}", found=found, hint=hint)


def _read_shards(folder: Path, weight_map: dict[str, str]) -> dict[str, TensorEntry]:
    problems = Problems(f"checkpoint {str(folder)!r} cannot be read")
    entries: dict[str, TensorEntry] = {}
    for shard in sorted(set(weight_map.values())) or [WEIGHTS]:
        if not (folder / shard).is_file():
            count = sum(value == shard for value in weight_map.values())
            problems.add(
                "shards that the index names and the folder lacks", f"{shard} ({count} tensors)", "download them"
            )
            continue
        try:
            found = read_header(folder / shard)
        except CheckpointError as error:
            problems.add("unreadable files", error.problem, "replace them")
            continue
        for entry in found:
            owner = weight_map.get(entry.name, shard)
            if owner == shard and entry.name in entries:
                both = f"{entry.name} ({entries[entry.name].file.name}, {shard})"
                problems.add("tensors in two shards", both, "keep the shards of one save only")
            elif owner == shard:
                entries[entry.name] = entry
    problems.raise_if_any()
    for name in sorted(weight_map.keys() - entries.keys()):
        problems.add(
            "tensors missing from the shard that the index gives",
            f"{name} ({weight_map[name]})",
            "keep the files of one save",
        )
    problems.raise_if_any()
    return entries


@contextmanager
def staged_folder(folder: Path, nbytes: int) -> Iterator[Path]:
    """A new folder beside `folder` to write a checkpoint in; it replaces `folder` when the block ends without an error.

    A kill at any time leaves the old checkpoint, the new one, or (while an existing folder is overwritten) one without
    an entry point, which cannot be read; never a mixture. The next save removes what a killed one left. Other files of
    an existing folder stay.

    Args:
        folder: of the checkpoint.
        nbytes: size of the weights; less free disk space is an error at once.

    Raises:
        CheckpointError: the folder cannot be written or the disk is full; nothing is left behind.
    """
    stage: Path | None = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(folder.parent).free < nbytes:
            raise OSError(errno.ENOSPC, f"the weights take {_in_words(nbytes)}, more than the disk has left")
        for leftover in folder.parent.glob(f".{glob.escape(folder.name)}.*.tmp"):
            shutil.rmtree(leftover, ignore_errors=True)
        stage = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".tmp", dir=folder.parent))
        yield stage
        # mkdtemp creates folders for their owner only.
        umask = os.umask(0)
        os.umask(umask)
        stage.chmod(0o777 & ~umask)
        _publish(stage, folder)
    except OSError as error:
        free = shutil.disk_usage(next(p for p in [folder, *folder.parents] if p.exists())).free
        raise CheckpointError(
            f"checkpoint {str(folder)!r} cannot be written: {error.strerror or error}",
            found=f"{_in_words(free)} free",
            hint="give a folder that can be written, with room for the weights",
        ) from error
    finally:
        if stage is not None:
            shutil.rmtree(stage, ignore_errors=True)


def _in_words(nbytes: int) -> str:
    unit, size = next(((unit, size) for unit, size in _SIZES.items() if nbytes >= size), ("bytes", 1))
    return f"{nbytes / size:,.1f} {unit}" if size > 1 else f"{nbytes} bytes"


def _publish(stage: Path, folder: Path) -> None:
    if not folder.exists():
        stage.rename(folder)
        return
    new = sorted(path.name for path in stage.iterdir())
    stale = {path.name for path in folder.glob("model-*-of-*.safetensors")} | {WEIGHTS, INDEX}
    if set(new) & stale != {WEIGHTS}:
        # Without an entry point the folder cannot be read, so a mixture of shards never is.
        (folder / INDEX).unlink(missing_ok=True)
        (folder / WEIGHTS).unlink(missing_ok=True)
    for name in sorted(new, key=lambda name: name in (WEIGHTS, INDEX)):
        os.replace(stage / name, folder / name)
    for name in stale.difference(new):
        (folder / name).unlink(missing_ok=True)


def save_generation_config(model: Any, folder: Path) -> None:
    """generation_config.json when the model generates."""
    generation = getattr(model, "generation_config", None)
    if generation is not None and getattr(model, "can_generate", lambda: False)():
        generation.save_pretrained(folder)
