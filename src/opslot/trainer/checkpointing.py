"""Checkpoints that are there whole or not at all: tensors by torch's DCP, the rest as JSON beside them."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opslot._base.errors import CheckpointError
from opslot._base.logging import get_logger

if TYPE_CHECKING:
    import torch

logger = get_logger(__name__)

CHECKPOINTS = "checkpoints"
STATE_FILE = "trainer_state.json"
KERNELS_FILE = "kernels.json"
_UNFINISHED = ".unfinished-"
_DISCARDED = ".discarded-"


def checkpoint_name(step: int) -> str:
    """Folder of the checkpoint taken after `step`; names sort as steps do."""
    return f"step_{step:08d}"


def is_complete(folder: Path) -> bool:
    """Whether `folder` is a checkpoint; one that is being written, or was cut short, has another name."""
    return folder.name.startswith("step_") and (folder / STATE_FILE).is_file() and (folder / ".metadata").is_file()


def find_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints below `folder`, oldest first."""
    return sorted(path for path in folder.glob("step_*") if is_complete(path)) if folder.is_dir() else []


def save_checkpoint(
    folder: Path,
    step: int,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    kernels: dict[str, Any],
    keep: int | None = None,
) -> Path:
    """Write the checkpoint of `step` below `folder`, then remove all but the newest `keep`.

    Everything is written under another name and renamed at the end, so a kill at any moment leaves the last one whole.
    Every rank calls it and writes its part of the tensors; rank 0 does the rest.

    Args:
        state: JSON-able state of the run (`step`, the place in the data); states of every rank's random generators are
            added.
        kernels: what `opslot.explain(model)` says.

    Raises:
        CheckpointError: the disk is full or may not be written; earlier checkpoints are intact.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    final = folder / checkpoint_name(step)
    unfinished = folder / f"{_UNFINISHED}{final.name}"
    try:
        if is_first_rank():
            folder.mkdir(parents=True, exist_ok=True)
            _sweep(folder)
        wait_for_ranks()
        model_state, optimizer_state = get_state_dict(model, optimizer)
        tensors = {"model": model_state, "optimizer": optimizer_state}
        with _one_process_is_fine():
            dcp.save(tensors, checkpoint_id=unfinished, no_dist=not torch_distributed())
        randomness = _of_all_ranks(random_states())
        if is_first_rank():
            write_json(unfinished / KERNELS_FILE, kernels)
            write_json(unfinished / STATE_FILE, {**state, "step": step, "random": randomness})
            if final.exists():
                _discard(final)
            unfinished.rename(final)
        wait_for_ranks()
    except (OSError, dcp.api.CheckpointException) as error:
        if is_first_rank():
            shutil.rmtree(unfinished, ignore_errors=True)
        raise CheckpointError(
            f"the checkpoint of step {step} cannot be written to {folder}: {_root_cause(error)}\n"
            "  to do: make room there, then run again with train.resume_from: latest; earlier checkpoints are intact"
        ) from error
    if keep and is_first_rank():
        for old in find_checkpoints(folder)[:-keep]:
            _discard(old)
    return final


def read_state(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The run's state and the kernels that a checkpoint records.

    Raises:
        CheckpointError: either file is damaged.
    """
    try:
        return json.loads((folder / STATE_FILE).read_text()), json.loads((folder / KERNELS_FILE).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{_damaged(folder)}: {error}") from error


def load_checkpoint(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Read the tensors of a checkpoint into `model` and `optimizer`.

    Raises:
        CheckpointError: the checkpoint is damaged, or of another model.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model_state, optimizer_state = get_state_dict(model, optimizer)
    tensors = {"model": model_state, "optimizer": optimizer_state}
    try:
        with _one_process_is_fine():
            dcp.load(tensors, checkpoint_id=folder, no_dist=not torch_distributed())
    except (Exception, dcp.api.CheckpointException) as error:
        raise CheckpointError(f"{_damaged(folder)}: {_root_cause(error)}") from error
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)


def torch_distributed() -> bool:
    """Whether a process group exists."""
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


def is_first_rank() -> bool:
    """Whether this process writes what is written once."""
    import torch.distributed as dist

    return not torch_distributed() or dist.get_rank() == 0


def wait_for_ranks() -> None:
    """Return when every rank got here."""
    import torch.distributed as dist

    if torch_distributed():
        dist.barrier()


def _of_all_ranks(value: Any) -> list[Any]:
    import torch.distributed as dist

    if not torch_distributed():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@contextlib.contextmanager
def _one_process_is_fine() -> Iterator[None]:
    """Without the warning that DCP gives when there is no process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


def random_states() -> dict[str, Any]:
    """States of Python's, NumPy's and torch's generators, as plain data."""
    import numpy as np
    import torch

    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002  (users' code draws from it)
    states: dict[str, Any] = {
        "python": [version, list(internal), gauss],
        "numpy": [name, np.asarray(keys).tolist(), position, has_gauss, cached],
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state().numpy().tobytes().hex()
    return states


def restore_random_states(states: dict[str, Any]) -> None:
    """Undo what was drawn since `random_states`."""
    import numpy as np
    import torch

    def bytes_of(text: str) -> torch.Tensor:
        return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)

    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))  # noqa: NPY002
    torch.set_rng_state(bytes_of(states["torch"]))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(bytes_of(states["cuda"]))


def write_json(path: Path, value: Any) -> None:
    """Write JSON so that a reader sees the old file or the new one, never half of one."""
    write_text(path, json.dumps(value, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """As `write_json`, for text."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with beside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


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


def _damaged(folder: Path) -> str:
    return (
        f"the checkpoint {folder} cannot be read; move it away and resume from the one before\n"
        "  (train.resume_from: latest, or a folder)\n  found"
    )


def _root_cause(error: BaseException) -> str:
    failures = getattr(error, "failures", None)
    if failures:
        first = next(iter(failures.values()))
        return _root_cause(first[0] if isinstance(first, tuple) else first)
    return str(error) or type(error).__name__
