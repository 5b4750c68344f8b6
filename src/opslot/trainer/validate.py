"""Everything about a run that can be found wrong before anything is built or written."""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass
from pathlib import Path

from opslot._base.device import has_package
from opslot._base.errors import ConfigError, count_of, list_problems
from opslot._base.launcher import launched_world_size
from opslot.data import find_files
from opslot.trainer.checkpointing import (
    CHECKPOINTS,
    STATE_FILE,
    damaged_checkpoints,
    find_checkpoints,
    is_complete,
    newer_checkpoints,
    step_of,
)
from opslot.trainer.config import ModelConfig, RunConfig, TrainConfig

# NumPy takes 32 bits, and each rank adds its number.
_SEEDS = 2**31


@dataclass(frozen=True)
class Inputs:
    """What a valid configuration points to.

    Attributes:
        config_path, tokenizer_path: resolved defaults included.
        train_files, eval_files: found files; without `data.eval_path`, `eval_files` is empty.
        checkpoint: folder to resume from, or None for a fresh start.
    """

    config_path: Path
    tokenizer_path: Path
    train_files: list[Path]
    eval_files: list[Path]
    checkpoint: Path | None


def validate(config: RunConfig) -> Inputs:
    """Check `config` against itself, the files and this machine; nothing is written.

    Raises:
        ConfigError: every problem found, one a line.
    """
    problems: list[str] = []
    _check_numbers(config, problems)
    _check_processes(config, problems)
    config_path, tokenizer_path = _check_model(config.model, problems)
    data = config.data
    train_files = find_files(data.train_path, "data.train_path", problems)
    eval_files = find_files(data.eval_path, "data.eval_path", problems) if data.eval_path else []
    checkpoint = _check_output(config.train, problems)
    if config.train.logging.wandb and not has_package("wandb"):
        problems.append("train.logging.wandb is on, but wandb is not installed; pip install wandb, or turn it off")
    if problems:
        raise ConfigError(list_problems(f"the run cannot start, {count_of(problems)}", problems, shown=30))
    return Inputs(config_path, tokenizer_path, train_files, eval_files, checkpoint)


def data_parallel_size(train: TrainConfig) -> int:
    """Processes, or groups of `sp_size`, that train on different rows."""
    return max(1, launched_world_size() // train.sp_size)


def micro_batch_size(train: TrainConfig) -> int:
    """Rows that one process runs at a time."""
    return train.micro_batch_size or max(1, train.global_batch_size // data_parallel_size(train))


def _check_numbers(config: RunConfig, problems: list[str]) -> None:
    train, data = config.train, config.data
    at_least = {
        "train.max_steps": (train.max_steps, 1),
        "train.global_batch_size": (train.global_batch_size, 1),
        "train.micro_batch_size": (train.micro_batch_size, 1),
        "train.warmup_steps": (train.warmup_steps, 0),
        "train.weight_decay": (train.weight_decay, 0),
        "train.max_grad_norm": (train.max_grad_norm, 0),
        "train.seed": (train.seed, 0),
        "train.save_steps": (train.save_steps, 1),
        "train.save_total_limit": (train.save_total_limit, 1),
        "train.eval_steps": (train.eval_steps, 1),
        "train.logging.log_steps": (train.logging.log_steps, 1),
        "train.sp_size": (train.sp_size, 1),
        "train.ep_size": (train.ep_size, 1),
        "train.fsdp.replicas": (train.fsdp.replicas, 1),
        "train.fsdp.prefetch": (train.fsdp.prefetch, 0),
        "data.max_seq_len": (data.max_seq_len, 2),
        "data.num_workers": (data.num_workers, 0),
    }
    for name, (value, least) in at_least.items():
        if value is not None and not value >= least:
            problems.append(f"{name}={value} must be at least {least}")
    optimizer = train.optimizer
    above_zero = {"train.lr": train.lr, "train.num_epochs": train.num_epochs, "train.optimizer.eps": optimizer.eps}
    problems += [f"{name}={value} must be above 0" for name, value in above_zero.items() if not value > 0]
    finite = {**above_zero, "train.weight_decay": train.weight_decay}
    problems += [f"{name} must be finite" for name, value in finite.items() if value == math.inf]
    if train.seed >= _SEEDS:
        problems.append(f"train.seed={train.seed} must be below {_SEEDS}")
    shares = {
        "train.optimizer.beta1": optimizer.beta1,
        "train.optimizer.beta2": optimizer.beta2,
        "train.optimizer.min_lr_ratio": optimizer.min_lr_ratio,
        "data.eval_fraction": data.eval_fraction,
    }
    problems += [f"{name}={value} must be in [0, 1)" for name, value in shares.items() if not 0 <= value < 1]


def _check_processes(config: RunConfig, problems: list[str]) -> None:
    from opslot.distributed import check_sizes

    train = config.train
    processes, sizes = launched_world_size(), (train.fsdp.replicas, train.sp_size, train.ep_size)
    if min(sizes) < 1:
        return
    if processes == 1:
        for name, size in {"sp_size": train.sp_size, "ep_size": train.ep_size, "fsdp.replicas": sizes[0]}.items():
            if size > 1:
                problems.append(
                    f"train.{name}={size} needs a multiple of {size} processes, but this run has 1; start it with "
                    f"torchrun --nproc-per-node {size} -m opslot train CONFIG.yaml, or set train.{name}: 1"
                )
    else:
        try:
            check_sizes(processes, sizes[0], sp=train.sp_size, ep=train.ep_size)
        except ConfigError as error:
            problems.append(f"{error} (train.fsdp.replicas is dp_replicate, train.sp_size sp, train.ep_size ep)")
            return
    if config.data.max_tokens_per_batch is None:
        _check_batch(train, problems)
    else:
        _check_token_batch(config, problems)


def _check_token_batch(config: RunConfig, problems: list[str]) -> None:
    train, ranks = config.train, data_parallel_size(config.train)
    room, longest = config.data.max_tokens_per_batch or 0, config.data.max_seq_len
    if room < longest:
        problems.append(
            f"data.max_tokens_per_batch={room} has no room for a document of data.max_seq_len={longest} tokens; "
            f"make it at least {longest}, or max_seq_len at most {room}"
        )
    if train.micro_batch_size is not None:
        problems.append(
            f"train.micro_batch_size={train.micro_batch_size} counts rows, but data.max_tokens_per_batch="
            f"{room} makes micro batches by tokens; leave out one of them"
        )
    if not config.data.packing:
        problems.append("data.packing is off, but data.max_tokens_per_batch packs; leave out one of them")
    if train.global_batch_size < ranks:
        problems.append(
            f"train.global_batch_size={train.global_batch_size} rows of data.max_seq_len tokens are too few for "
            f"{ranks} data-parallel ranks; make it at least {ranks}"
        )


def _check_batch(train: TrainConfig, problems: list[str]) -> None:
    total, micro, ranks = train.global_batch_size, train.micro_batch_size, data_parallel_size(train)
    if min(total, micro or 1) < 1:
        return
    if total % ranks:
        problems.append(
            f"train.global_batch_size={total} cannot be shared by {ranks} data-parallel ranks; "
            f"make it a multiple of {ranks}"
        )
    elif micro and total % (micro * ranks):
        fits = [size for size in range(1, total // ranks + 1) if total // ranks % size == 0]
        on = f" on {ranks} data-parallel ranks" if ranks > 1 else ""
        problems.append(
            f"train.global_batch_size={total} is no multiple of train.micro_batch_size={micro}{on}; "
            f"micro batches that fit: {', '.join(map(str, fits))}"
        )


def _check_model(model: ModelConfig, problems: list[str]) -> tuple[Path, Path]:
    from opslot.slots import OpsImplementationConfig

    for name in ("config_path", "model_path", "tokenizer_path"):
        path = getattr(model, name)
        if path and not Path(path).expanduser().exists():
            problems.append(f"model.{name}: no such file or folder: {path}; relative paths start at {Path.cwd()}")
    config_path = model.config_path or model.model_path
    if not config_path:
        problems.append("neither model.config_path nor model.model_path is set; name a folder with config.json")
    tokenizer_path = model.tokenizer_path or _first_with_tokenizer(model.model_path, model.config_path)
    if config_path and not tokenizer_path:
        problems.append(
            f"model.tokenizer_path is not set, and there is no tokenizer.json beside {config_path}; "
            "name the tokenizer's folder"
        )
    try:
        _register_ops()
        OpsImplementationConfig.make(model.ops_implementation)
    except ConfigError as error:
        problems.append(f"model.{error}".replace("\n", "\n  "))
    except TypeError as error:
        problems.append(f"model.ops_implementation: {error}")
    return Path(config_path or ".").expanduser(), Path(tokenizer_path or ".").expanduser()


def _register_ops() -> None:
    import opslot.models  # noqa: F401  (importing it registers the ops)


def _first_with_tokenizer(*paths: str | None) -> str | None:
    for path in paths:
        if path:
            folder = Path(path).expanduser()
            folder = folder if folder.is_dir() else folder.parent
            if any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
                return str(folder)
    return None


def _check_output(train: TrainConfig, problems: list[str]) -> Path | None:
    """The checkpoint to resume from; also that the output folder may be written and belongs to this run."""
    if not train.output_dir:
        problems.append("train.output_dir is empty; name a folder")
        return None
    output = Path(train.output_dir).expanduser()
    problem = _unwritable(output) or _unwritable(output / CHECKPOINTS)
    if problem:
        problems.append(f"train.output_dir: {problem}")
        return None
    present = find_checkpoints(output / CHECKPOINTS)
    if train.resume_from is None:
        if present:
            problems.append(
                f"train.output_dir: {output} holds checkpoints of another run (newest {present[-1].name}); "
                "set train.resume_from: latest to go on with it, or another train.output_dir"
            )
        return None
    if train.resume_from == "latest":
        return _latest(output / CHECKPOINTS, present, problems)
    wanted = Path(train.resume_from).expanduser()
    if not is_complete(wanted):
        what = "not a complete checkpoint" if wanted.exists() else "no such folder"
        known = ", ".join(path.name for path in present) or "none"
        problems.append(
            f"train.resume_from={train.resume_from}: {what}; give latest or a folder such as "
            f"{output / CHECKPOINTS / 'step_00000100'} (there: {known})"
        )
        return None
    own = (output / CHECKPOINTS).is_dir() and wanted.parent.samefile(output / CHECKPOINTS)
    later = [path.name for path in newer_checkpoints(wanted)] if own else []
    foreign = present and not own
    if later or foreign:
        problems.append(
            f"train.resume_from={train.resume_from}: {output} holds checkpoints that this run would mix with "
            f"({', '.join(later or [path.name for path in present])}); use another train.output_dir, or move them away"
        )
    return wanted


def _latest(folder: Path, present: list[Path], problems: list[str]) -> Path | None:
    """The newest checkpoint; a damaged one must not be passed over in silence, and steps with it."""
    newest = max([*present, *damaged_checkpoints(folder)], key=step_of, default=None)
    if newest is not None and newest not in present:
        before = present[-1].name if present else "the first step"
        problems.append(
            f"train.resume_from=latest: {newest} has lost files ({STATE_FILE} or .metadata), so it cannot be read; "
            f"restore it, or move it away to go on from {before}"
        )
    return present[-1] if present else None


def _unwritable(folder: Path) -> str | None:
    ancestor = folder
    while not ancestor.exists() and ancestor != ancestor.parent:
        ancestor = ancestor.parent
    if not ancestor.is_dir():
        return f"{folder} cannot be made, {ancestor} is a file"
    try:
        with tempfile.TemporaryDirectory(dir=ancestor, prefix=".opslot-"):
            return None
    except OSError as error:
        return f"{folder} cannot be written ({error.strerror}: {ancestor}); choose another folder"
