"""Checkpoints that are there whole or not at all: tensors by torch's DCP, the rest as JSON beside them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opslot._base.errors import CheckpointError, list_problems
from opslot._base.files import write_json
from opslot.trainer.random_states import random_states
from opslot.trainer.ranks import RankError, is_first_rank, of_all_ranks, on_first_rank, root_cause, torch_distributed

if TYPE_CHECKING:
    import torch

CHECKPOINTS = "checkpoints"
STATE_FILE = "trainer_state.json"
KERNELS_FILE = "kernels.json"
_UNFINISHED = ".unfinished-"
_DISCARDED = ".discarded-"
_PIECE_BYTES = 16 << 20
# Where the state file keeps the checksum of the rest of it.
_OWN_CHECKSUM = "crc32"


def checkpoint_name(step: int) -> str:
    """Folder of the checkpoint taken after `step`; names sort as steps do."""
    return f"step_{step:08d}"


def is_complete(folder: Path) -> bool:
    """Whether `folder` is a checkpoint; one that is being written, or was cut short, has another name."""
    return folder.name.startswith("step_") and (folder / STATE_FILE).is_file() and (folder / ".metadata").is_file()


def damaged_checkpoints(folder: Path) -> list[Path]:
    """Those below `folder` that have lost a file without which they are none, oldest first."""
    return sorted(path for path in folder.glob("step_*") if not is_complete(path)) if folder.is_dir() else []


def find_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints below `folder`, oldest first."""
    return sorted(path for path in folder.glob("step_*") if is_complete(path)) if folder.is_dir() else []


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint holds of a moment.

    Attributes:
        step: the last step done.
        tensors: state dicts of model and optimizer; this rank's parts.
        state: of the run, JSON-able, random generators of all ranks included.
        kernels: what `opslot.explain(model)` says.
    """

    step: int
    tensors: dict[str, Any]
    state: dict[str, Any]
    kernels: dict[str, Any]


def take_snapshot(
    step: int,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    kernels: dict[str, Any],
) -> Snapshot:
    """What a checkpoint of this moment holds; every rank calls it. The tensors are the live ones, not copies."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model_state, optimizer_state = get_state_dict(model, optimizer)
    tensors = {"model": model_state, "optimizer": optimizer_state}
    return Snapshot(step, tensors, {**state, "random": of_all_ranks(random_states)}, kernels)


def write_snapshot(folder: Path, snapshot: Snapshot, keep: int | None = None, group: Any = None) -> Path:
    """Write the checkpoint of `snapshot` below `folder`, then remove all but the newest `keep`.

    Everything is written under another name and renamed at the end, so a kill at any moment leaves the last one whole.
    Every rank of `group` calls it and writes its part of the tensors; rank 0 does the rest.

    Args:
        group: the process group that the ranks talk over; default the one of all.

    Raises:
        CheckpointError: on every rank, when a disk is full or may not be written; earlier checkpoints are intact.
    """
    import torch.distributed.checkpoint as dcp

    final = folder / checkpoint_name(snapshot.step)
    unfinished = folder / f"{_UNFINISHED}{final.name}"
    try:
        on_first_rank(lambda: _make_room(folder), group)
        with _one_process_is_fine():
            dcp.save(snapshot.tensors, checkpoint_id=unfinished, process_group=group, no_dist=not torch_distributed())
        files = {name: facts for own in of_all_ranks(lambda: _own_files(unfinished), group) for name, facts in own}
        on_first_rank(lambda: _finish(unfinished, final, snapshot, dict(sorted(files.items()))), group)
    except (OSError, RankError, dcp.api.CheckpointException) as error:
        if is_first_rank():
            shutil.rmtree(unfinished, ignore_errors=True)
        raise CheckpointError(
            f"the checkpoint of step {snapshot.step} cannot be written to {folder}: {root_cause(error)}",
            hint="make room there, then run again with train.resume_from: latest; earlier checkpoints are intact",
        ) from error
    if keep and is_first_rank():
        for old in find_checkpoints(folder)[:-keep]:
            _discard(old)
    return final


def save_checkpoint(
    folder: Path,
    step: int,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    kernels: dict[str, Any],
    keep: int | None = None,
) -> Path:
    """`take_snapshot` and `write_snapshot`; returns when the checkpoint is there."""
    return write_snapshot(folder, take_snapshot(step, model, optimizer, state, kernels), keep)


def read_state(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The run's state and the kernels that a checkpoint records.

    Raises:
        CheckpointError: either file is damaged.
    """
    state, kernels = (_read_json(folder, name) for name in (STATE_FILE, KERNELS_FILE))
    lacking = [name for name in ("step", "random") if name not in state]
    if lacking:
        raise CheckpointError(f"{_damaged(folder)}: {STATE_FILE} without {', '.join(lacking)}")
    own = state.pop(_OWN_CHECKSUM, None)
    if own is not None and own != _checksum_of(state):
        raise CheckpointError(f"{_damaged(folder)}: {_other_than_written(STATE_FILE)}")
    recorded = state.get("files", {}).get(KERNELS_FILE)
    change = recorded and _change(folder / KERNELS_FILE, recorded)
    if change:
        raise CheckpointError(f"{_damaged(folder)}: {change}")
    return state, kernels


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    try:
        value = json.loads((folder / name).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{_damaged(folder)}: {name}: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{_damaged(folder)}: {_other_than_written(name)}")
    return value


def load_checkpoint(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Read the tensors of a checkpoint into `model` and `optimizer`.

    Every file is compared with what was recorded of it first, each by one of the ranks. Of the optimizer its state is
    read; settings, such as the weight decay, stay those that it was built with.

    Raises:
        CheckpointError: on every rank, when the checkpoint is damaged, or of another model.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    settings = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    model_state, optimizer_state = get_state_dict(model, optimizer)
    tensors = {"model": model_state, "optimizer": optimizer_state}
    try:
        problems = [line for of_rank in of_all_ranks(lambda: _changed_files(folder)) for line in of_rank]
        if problems:
            raise CheckpointError(list_problems(_damaged(folder), problems))
        _check_model(folder, model_state)
        with _one_process_is_fine():
            dcp.load(tensors, checkpoint_id=folder, no_dist=not torch_distributed())
    except CheckpointError:
        raise
    except (Exception, dcp.api.CheckpointException) as error:
        raise CheckpointError(f"{_damaged(folder)}: {root_cause(error)}") from error
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(own)


def _make_room(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    _sweep(folder)


def _own_files(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """Names, sizes and checksums of the files that this rank wrote."""
    import torch.distributed as dist

    # torch names them after the rank.
    names = sorted(folder.glob(f"__{dist.get_rank() if torch_distributed() else 0}_*"))
    own = [*names, folder / ".metadata"] if is_first_rank() else names
    return [(path.name, _facts(path)) for path in own]


def _finish(unfinished: Path, final: Path, snapshot: Snapshot, files: dict[str, Any]) -> None:
    write_json(unfinished / KERNELS_FILE, snapshot.kernels)
    files = {**files, KERNELS_FILE: _facts(unfinished / KERNELS_FILE)}
    state = {**snapshot.state, "step": snapshot.step, "files": files}
    write_json(unfinished / STATE_FILE, {**state, _OWN_CHECKSUM: _checksum_of(state)})
    if final.exists():
        _discard(final)
    unfinished.rename(final)
    _sync_folder(final.parent)


def _changed_files(folder: Path) -> list[str]:
    """What is wrong with this rank's share of the files; sizes first, so that most damage is found at once."""
    import torch.distributed as dist

    state, _ = read_state(folder)
    recorded: dict[str, Any] = state.get("files", {})
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if torch_distributed() else (0, 1)
    changes = [_change(folder / name, recorded[name]) for name in list(recorded)[rank::ranks]]
    return [change for change in changes if change is not None]


def _change(path: Path, facts: dict[str, Any]) -> str | None:
    """How a file differs from what was recorded of it."""
    if not path.is_file():
        return f"{path.name} is missing"
    if path.stat().st_size != facts["bytes"]:
        return f"{path.name} has {path.stat().st_size:,} bytes, but {facts['bytes']:,} were written"
    return None if _checksum(path) == facts["crc32"] else _other_than_written(path.name)


def _other_than_written(name: str) -> str:
    return f"{name} is not the file that was written: its checksum differs"


def _check_model(folder: Path, model_state: dict[str, Any]) -> None:
    """Compare names and shapes with the checkpoint's."""
    from torch.distributed.checkpoint import FileSystemReader

    prefix = "model."
    saved = FileSystemReader(folder).read_metadata().state_dict_metadata
    there = {key.removeprefix(prefix): getattr(saved[key], "size", None) for key in saved if key.startswith(prefix)}
    here = {name: value.shape for name, value in model_state.items()}
    problems = [f"{name}: only in the checkpoint" for name in sorted(there.keys() - here.keys())]
    problems += [f"{name}: only in this model" for name in sorted(here.keys() - there.keys())]
    for name, shape in here.items():
        size = there.get(name)
        if size is not None and size != shape:
            problems.append(f"{name}: {list(size)} in the checkpoint, {list(shape)} in this model")
    if problems:
        raise CheckpointError(
            list_problems(f"the checkpoint {folder} is of another model", problems),
            hint="set model.config_path to the config that it was trained with, or another train.output_dir",
        )


def _facts(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "crc32": _checksum(path)}


def _checksum_of(state: dict[str, Any]) -> str:
    """Of what JSON keeps of `state`."""
    kept = json.loads(json.dumps(state))
    return f"{zlib.crc32(json.dumps(kept, sort_keys=True).encode()):08x}"


def _checksum(path: Path) -> str:
    value = 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            value = zlib.crc32(piece, value)
    return f"{value:08x}"


@contextlib.contextmanager
def _one_process_is_fine() -> Iterator[None]:
    """Without the warning that DCP gives when there is no process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


def _discard(folder: Path) -> None:
    """Remove a checkpoint under another name first, so that a kill leaves no half of one."""
    doomed = folder.with_name(f"{_DISCARDED}{folder.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _sweep(folder: Path) -> None:
    """Remove what a killed run left behind."""
    for leftover in [*folder.glob(f"{_UNFINISHED}*"), *folder.glob(f"{_DISCARDED}*")]:
        shutil.rmtree(leftover, ignore_errors=True)


def _sync_folder(folder: Path) -> None:
    """Make the names in `folder` outlast a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _damaged(folder: Path) -> str:
    return (
        f"the checkpoint {folder} cannot be read; move it away and resume from the one before\n"
        "  (train.resume_from: latest, or a folder)\n  found"
    )
