"""The output folder: checks before a run that it can be written and holds this run's checkpoints; its description."""

from __future__ import annotations

import itertools
import os
import tempfile
from pathlib import Path

from torch import nn

from opslot._base.files import remove_temporary_files, write_json, write_text
from opslot.checkpoint.training_state import STATE_FILE, is_complete
from opslot.distributed import gather_objects, on_first_rank
from opslot.distributed.shared_folder import not_shared, require_shared
from opslot.optim.selection import adamw_kernel
from opslot.slots import explain
from opslot.trainer.checkpointing import CHECKPOINTS, damaged_checkpoints, find_checkpoints, newer_checkpoints, step_of
from opslot.trainer.config import RunConfig, TrainConfig
from opslot.trainer.parse import to_yaml

_ANOTHER = "choose another folder"
# What a run writes into its folder.
_FILES = (
    "config.yaml",
    "exports.json",
    "kernels.json",
    "kernels.txt",
    "loss.png",
    "metrics.jsonl",
    "samples.jsonl",
    "wandb_run_id",
)
_FOLDERS = ("hf", "hf_best", "hf_step_*", "profile", "tensorboard")


def check_output(train: TrainConfig, problems: list[str]) -> Path | None:
    """The checkpoint to resume from; also checks that the output folder can be written and belongs to this run."""
    if not train.output_dir:
        problems.append("train.output_dir is empty; set it to a folder")
        return None
    output = Path(train.output_dir)
    problem = _unwritable(output) or _unwritable(output / CHECKPOINTS) or _of_another_kind(output)
    if problem:
        problems.append(f"train.output_dir: {problem}")
        return None
    present = find_checkpoints(output / CHECKPOINTS)
    if train.checkpoint.resume_from is None:
        if present:
            problems.append(
                f"train.output_dir: {output} holds checkpoints of another run (newest {present[-1].name}); "
                "set train.checkpoint.resume_from: latest to continue it, or another train.output_dir"
            )
        return None
    if train.checkpoint.resume_from == "latest":
        return _latest(output / CHECKPOINTS, present, problems)
    wanted = Path(train.checkpoint.resume_from)
    if not is_complete(wanted):
        what = "not a complete checkpoint" if wanted.exists() else "no such folder"
        known = ", ".join(path.name for path in present) or "none"
        problems.append(
            f"train.checkpoint.resume_from={train.checkpoint.resume_from}: {what}; set it to latest or a folder such "
            f"as {output / CHECKPOINTS / 'step_00000100'} (existing: {known})"
        )
        return None
    own = (output / CHECKPOINTS).is_dir() and wanted.parent.samefile(output / CHECKPOINTS)
    later = [path.name for path in newer_checkpoints(wanted)] if own else []
    foreign = present and not own
    if later or foreign:
        problems.append(
            f"train.checkpoint.resume_from={train.checkpoint.resume_from}: {output} has other checkpoints "
            f"({', '.join(later or [path.name for path in present])}); use another train.output_dir, or move them away"
        )
    return wanted


def _latest(folder: Path, present: list[Path], problems: list[str]) -> Path | None:
    """The newest checkpoint. A damaged newest one is a problem: skipping it would silently repeat steps."""
    newest = max([*present, *damaged_checkpoints(folder)], key=step_of, default=None)
    if newest is not None and newest not in present:
        before = present[-1].name if present else "the first step"
        problems.append(
            f"train.checkpoint.resume_from=latest: {newest} is incomplete ({STATE_FILE} or .metadata is missing); "
            f"restore it, or move it away to continue from {before}"
        )
    return present[-1] if present else None


def require_same_checkpoint(train: TrainConfig, checkpoint: Path | None) -> None:
    """Check that all ranks found the same checkpoint to resume from.

    Raises:
        ConfigError: on every rank, if they found different ones, since their output folders differ.
    """
    found = gather_objects(checkpoint)
    other = next((rank for rank, path in enumerate(found) if path != found[0]), None)
    if other is not None:
        paths = f"rank 0 would resume from {found[0]}, rank {other} from {found[other]}"
        raise not_shared(Path(train.output_dir), "train.output_dir", paths)


def _unwritable(folder: Path) -> str | None:
    """Why a folder cannot be written, or created; None where it can."""
    ancestor = folder
    # Unlike Path.exists, it does not raise for a folder that may not be searched.
    while not os.path.exists(ancestor) and ancestor != ancestor.parent:
        if os.path.islink(ancestor):
            return f"{ancestor} is a link to {os.readlink(ancestor)}, which does not exist; {_ANOTHER}"
        ancestor = ancestor.parent
    if not ancestor.is_dir():
        what = f"{folder} is a file" if ancestor == folder else f"{folder} cannot be created: {ancestor} is a file"
        return f"{what}; {_ANOTHER}"
    try:
        with tempfile.TemporaryDirectory(dir=ancestor, prefix=".opslot-"):
            return None
    except OSError as error:
        # /proc raises FileNotFoundError, although it exists.
        missing = isinstance(error, FileNotFoundError)
        found = "its file system takes no new folders" if missing else error.strerror
    what = "cannot be written" if ancestor == folder else f"cannot be created in {ancestor}"
    return f"{folder} {what} ({found}); {_ANOTHER}"


def _of_another_kind(output: Path) -> str | None:
    """A folder where a run writes a file, or the reverse; None without one."""
    found = [f"{output / name} is a folder" for name in _FILES if (output / name).is_dir()]
    found += [f"{path} is a file" for name in _FOLDERS for path in sorted(output.glob(name)) if path.is_file()]
    return f"{', '.join(found)}; move it away, or {_ANOTHER}" if found else None


def start_output(folder: Path, config: RunConfig, model: nn.Module) -> None:
    """Write the run's description, and check that all ranks see it: each writes its part of a checkpoint."""
    on_first_rank(lambda: write_description(folder, config, model))
    require_shared(folder, "train.output_dir")


def write_description(folder: Path, config: RunConfig, model: nn.Module) -> None:
    """Write the configuration of the run, keeping others that are there, and its kernels."""
    remove_temporary_files(folder)
    text, path = to_yaml(config), folder / "config.yaml"
    if path.is_file() and path.read_bytes() != text.encode():
        numbers = itertools.count(1)
        older = next(file for n in numbers if not (file := path.with_name(f"config.{n}.yaml")).exists())
        path.rename(older)
    write_text(path, text)
    kernels = explain(model)
    table = f"{kernels}\n"
    if config.train.optimizer.name == "adamw":
        of_optimizer = adamw_kernel(model)
        table += f"\noptimizer: adamw/standard runs {of_optimizer.chosen} ({of_optimizer.why})\n"
    write_text(folder / "kernels.txt", table)
    write_json(folder / "kernels.json", kernels.to_dict())
