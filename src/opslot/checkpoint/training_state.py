"""Checkpoints to resume training from: model and optimizer by torch's DCP, the state of the run as JSON beside them.

A checkpoint is one folder: DCP's files, `kernels.json`, and `trainer_state.json` with the sizes and checksums of the
others. It is written under another name and renamed at the end. Reading one runs no code: the pickles in it may name
only the classes that DCP writes.
"""

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
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from opslot._base.errors import CheckpointError, list_problems
from opslot._base.files import write_json
from opslot.checkpoint.adapters import has_adapters
from opslot.checkpoint.dcp_reader import LoadPlanner, MetadataReader
from opslot.checkpoint.model_tensors import clean_fqn, partly_read_experts
from opslot.checkpoint.quantized_moments import plain_state, quantized_state
from opslot.distributed.consensus import (
    RankError,
    is_first_rank,
    on_all_ranks,
    on_first_rank,
    root_cause,
)

STATE_FILE = "trainer_state.json"
KERNELS_FILE = "kernels.json"
METADATA_FILE = ".metadata"
_UNFINISHED = ".unfinished-"
_DISCARDED = ".discarded-"
_CHUNK_BYTES = 16 << 20
# The entry of the state file that holds the checksum of its other entries.
_OWN_CHECKSUM = "crc32"


def is_complete(folder: Path) -> bool:
    """Whether `folder` has what a checkpoint needs, whatever its name."""
    return (folder / STATE_FILE).is_file() and (folder / METADATA_FILE).is_file()


@dataclass(frozen=True)
class Snapshot:
    """The contents of a checkpoint.

    Attributes:
        step: the last step done.
        tensors: state dicts of model and optimizer: this rank's shards, and its share of the tensors that all hold.
        state: of the run, JSON-able: "tokens_seen", "data" (the dataloader's state), "random" (those of each rank's
            generators), and what else the trainer keeps.
        kernels: what `opslot.explain(model)` reports.
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
    """The current state, for `write_snapshot`. Every rank calls it. The tensors are not copied.

    Of a model with adapters, these alone: the base model's weights do not change.
    """
    model_state, optimizer_state = _state_dicts(model, optimizer)
    optimizer_state = plain_state(optimizer_state)
    others = _saved_by_other_ranks(model_state)
    for tensors in (model_state, optimizer_state["state"]):
        for name in others & tensors.keys():
            del tensors[name]
    return Snapshot(step, {"model": model_state, "optimizer": optimizer_state}, state, kernels)


def _saved_by_other_ranks(model_state: dict[str, Any]) -> set[str]:
    """The names of whole tensors that this rank need not save, and so not copy: each is saved by one rank."""
    rank, ranks = _rank_and_size()
    loads = [0] * ranks
    others = set()
    tensors = {name: value for name, value in model_state.items() if isinstance(value, torch.Tensor)}
    whole = {name: value.numel() for name, value in tensors.items() if not isinstance(value, DTensor)}
    for name, size in sorted(whole.items(), key=lambda item: (-item[1], item[0])):
        owner = loads.index(min(loads))
        loads[owner] += size
        if owner != rank:
            others.add(name)
    return others


def write_snapshot(folder: Path, snapshot: Snapshot, group: ProcessGroup | None = None) -> None:
    """Write `snapshot` to `folder`, which appears when it is complete and replaces one of the same name.

    Every rank of `group` calls it and writes its shards; rank 0 writes the rest.

    Args:
        group: default the group of all ranks.

    Raises:
        CheckpointError: on every rank, if a disk is full or cannot be written; nothing is left behind.
    """
    unfinished = folder.with_name(f"{_UNFINISHED}{folder.name}")
    try:
        on_first_rank(lambda: _prepare(folder.parent), group)
        with _single_process_allowed() as no_dist:
            dcp.save(snapshot.tensors, checkpoint_id=str(unfinished), process_group=group, no_dist=no_dist)
        files = {name: facts for own in on_all_ranks(lambda: _own_files(unfinished), group) for name, facts in own}
        on_first_rank(lambda: _finish(unfinished, folder, snapshot, dict(sorted(files.items()))), group)
    except (OSError, RankError, dcp.api.CheckpointException) as error:
        if is_first_rank():
            shutil.rmtree(unfinished, ignore_errors=True)
        raise CheckpointError(
            f"the checkpoint of step {snapshot.step} cannot be written to {folder.parent}",
            found=root_cause(error),
            hint="free disk space, then set train.checkpoint.resume_from: latest; earlier checkpoints are intact",
        ) from error


def read_state(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state of the run and the kernels that a checkpoint records.

    Raises:
        CheckpointError: either file is damaged or was changed.
    """
    state, kernels = (_read_json(folder, name) for name in (STATE_FILE, KERNELS_FILE))
    missing = [name for name in ("step", "random", "files", _OWN_CHECKSUM) if name not in state]
    if missing:
        raise damaged(folder, f"{STATE_FILE} without {', '.join(missing)}")
    if state.pop(_OWN_CHECKSUM) != _checksum_of(state):
        raise damaged(folder, _changed(STATE_FILE))
    _check_state(folder, state)
    change = _change(folder, KERNELS_FILE, state["files"].get(KERNELS_FILE))
    if change:
        raise damaged(folder, change)
    return state, kernels


def load_snapshot(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load the tensors of a checkpoint into `model` and `optimizer`.

    First every file is compared with its recorded checksum, each by one rank. Only the optimizer's state is loaded; its
    settings, such as the weight decay, stay as they are.

    Raises:
        CheckpointError: on every rank, if the checkpoint is damaged, holds code, or is of another model.
    """
    settings = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    model_state, held = _state_dicts(model, optimizer)
    optimizer_state = plain_state(held)
    # Without the groups, whose settings and number the run's configuration decides.
    tensors = {"model": model_state, "optimizer": {"state": optimizer_state["state"]}}
    try:
        changes = [change for of_rank in on_all_ranks(lambda: _changed_files(folder)) for change in of_rank]
        if changes:
            raise damaged(folder, *changes)
        partly_read = partly_read_experts(model)
        _check_model(folder, model_state, partly_read)
        known = {_parameter_of(key) for key in MetadataReader(folder).read_metadata().state_dict_metadata} - {""}
        # A parameter that had no gradient so far, as those of an encoder before its first sample, has no state.
        for state in (held["state"], optimizer_state["state"]) if known else ():
            for name in state.keys() - known:
                del state[name]
        with _single_process_allowed() as no_dist:
            dcp.load(tensors, storage_reader=MetadataReader(folder), planner=LoadPlanner(partly_read), no_dist=no_dist)
    except CheckpointError:
        raise
    except (Exception, dcp.api.CheckpointException) as error:
        raise damaged(folder, root_cause(error)) from error
    set_state_dict(
        model,
        optimizer,
        model_state_dict=model_state,
        optim_state_dict=quantized_state(held, optimizer_state),
        options=StateDictOptions(strict=False),  # `_check_model` compared the names
    )
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(own)


def _parameter_of(key: str) -> str:
    """The parameter whose optimizer state a key of a checkpoint is of; "" for another key."""
    prefix = "optimizer.state."
    return key.removeprefix(prefix).rpartition(".")[0] if key.startswith(prefix) else ""


def _state_dicts(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a checkpoint has of model and optimizer, whose moments may be quantized."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    if has_adapters(model):
        named = model.named_parameters(remove_duplicate=False)
        frozen = {clean_fqn(name) for name, parameter in named if not parameter.requires_grad}
        model_state = {name: value for name, value in model_state.items() if name not in frozen}
    return model_state, optimizer_state


def discard(folder: Path) -> None:
    """Remove a checkpoint, renamed first, so that a kill leaves no incomplete one."""
    doomed = folder.with_name(f"{_DISCARDED}{folder.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def damaged(folder: Path, *found: str) -> CheckpointError:
    """The error for a checkpoint that cannot be read."""
    what, hint = f"the checkpoint {folder} cannot be read", "move it away and resume from the one before it"
    if len(found) == 1:
        return CheckpointError(what, found=found[0], hint=hint)
    return CheckpointError(list_problems(what, found), hint=hint)


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    try:
        value = json.loads((folder / name).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise damaged(folder, f"{name}: {error}") from error
    if not isinstance(value, dict):
        raise damaged(folder, _changed(name))
    return value


def _check_state(folder: Path, state: dict[str, Any]) -> None:
    """Types of the entries that are read below; anyone can write a matching checksum."""
    step, random, files = state["step"], state["random"], state["files"]
    tokens, data = state.get("tokens_seen"), state.get("data")
    if type(step) is not int or step < 0:
        raise damaged(folder, f"{STATE_FILE}: step is {str(step)[:40]!r}")
    if not isinstance(random, list) or not all(isinstance(states, dict) for states in random):
        raise damaged(folder, f"{STATE_FILE}: random is not a list of states")
    if not isinstance(files, dict) or not all(_is_file_entry(*entry) for entry in files.items()):
        raise damaged(folder, f"{STATE_FILE}: files are not names with bytes and crc32")
    if type(tokens) is not int or tokens < 0:
        raise damaged(folder, f"{STATE_FILE}: tokens_seen is {str(tokens)[:40]!r}")
    if not isinstance(data, dict):
        raise damaged(folder, f"{STATE_FILE}: data is {str(data)[:40]!r}")


def _is_file_entry(name: str, facts: Any) -> bool:
    return (
        Path(name).name == name
        and isinstance(facts, dict)
        and type(facts.get("bytes")) is int
        and isinstance(facts.get("crc32"), str)
    )


def _prepare(folder: Path) -> None:
    """Make `folder`, and remove what killed runs left in it."""
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in [*folder.glob(f"{_UNFINISHED}*"), *folder.glob(f"{_DISCARDED}*")]:
        shutil.rmtree(leftover, ignore_errors=True)


def _own_files(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """Names, sizes and checksums of the files that this rank wrote."""
    rank, _ = _rank_and_size()
    # DCP names a file after the rank that writes it.
    names = sorted(folder.glob(f"__{rank}_*"))
    own = [*names, folder / METADATA_FILE] if is_first_rank() else names
    return [(path.name, _facts(path)) for path in own]


def _finish(unfinished: Path, final: Path, snapshot: Snapshot, files: dict[str, Any]) -> None:
    write_json(unfinished / KERNELS_FILE, snapshot.kernels)
    files = {**files, KERNELS_FILE: _facts(unfinished / KERNELS_FILE)}
    state = {**snapshot.state, "step": snapshot.step, "files": files}
    write_json(unfinished / STATE_FILE, {**state, _OWN_CHECKSUM: _checksum_of(state)})
    if final.exists():
        discard(final)
    unfinished.rename(final)
    _sync_folder(final.parent)


def _changed_files(folder: Path) -> list[str]:
    """What is wrong with this rank's share of the files."""
    state, _ = read_state(folder)
    recorded: dict[str, Any] = state["files"]
    rank, ranks = _rank_and_size()
    changes = [_change(folder, name, recorded[name]) for name in list(recorded)[rank::ranks]]
    if rank == 0 and METADATA_FILE not in recorded:
        changes.append(f"{STATE_FILE} records no {METADATA_FILE}")
    return [change for change in changes if change is not None]


def _change(folder: Path, name: str, facts: dict[str, Any] | None) -> str | None:
    """How a file differs from what was recorded of it."""
    path = folder / name
    if facts is None:
        return f"{STATE_FILE} records no {name}"
    if not path.is_file():
        return f"{name} is missing"
    if path.stat().st_size != facts["bytes"]:
        return f"{name} has {path.stat().st_size:,} bytes, but {facts['bytes']:,} were written"
    return None if _checksum(path) == facts["crc32"] else _changed(name)


def _changed(name: str) -> str:
    return f"{name} is not the file that was written: its checksum differs"


def _check_model(folder: Path, model_state: dict[str, Any], partly_read: set[str]) -> None:
    """Compare names and shapes with the checkpoint's; of `partly_read`, the shapes of one expert."""
    prefix = "model."
    saved = MetadataReader(folder).read_metadata().state_dict_metadata
    there = {key.removeprefix(prefix): getattr(saved[key], "size", None) for key in saved if key.startswith(prefix)}
    here = {name: value.shape for name, value in model_state.items()}
    problems = [f"{name}: only in the checkpoint" for name in sorted(there.keys() - here.keys())]
    problems += [f"{name}: only in this model" for name in sorted(here.keys() - there.keys())]
    for name, shape in here.items():
        size = there.get(name)
        first = 1 if name in partly_read else 0
        if size is not None and size[first:] != shape[first:]:
            problems.append(f"{name}: {list(size)} in the checkpoint, {list(shape)} in this model")
    if problems:
        hint = "set model.config_path to the config that it was trained with"
        adapted, adapts = (any(".lora_" in name for name in names) for names in (there, here))
        if adapted != adapts:
            hint = (
                f"its run had {'a' if adapted else 'no'} section lora: {'set lora.r' if adapted else 'remove lora.r'}"
            )
        raise CheckpointError(
            list_problems(f"the checkpoint {folder} is of another model", problems),
            hint=f"{hint}, or another train.output_dir",
        )


def _rank_and_size() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _facts(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "crc32": _checksum(path)}


def _checksum_of(state: dict[str, Any]) -> str:
    """The checksum of `state` as JSON."""
    kept = json.loads(json.dumps(state))
    return f"{zlib.crc32(json.dumps(kept, sort_keys=True).encode()):08x}"


def _checksum(path: Path) -> str:
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            value = zlib.crc32(chunk, value)
    return f"{value:08x}"


@contextlib.contextmanager
def _single_process_allowed() -> Iterator[bool]:
    """DCP's `no_dist`: whether there is no process group. Inside, DCP doesn't warn about that."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield not dist.is_initialized()


def _sync_folder(folder: Path) -> None:
    """Flush the names in `folder` to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
