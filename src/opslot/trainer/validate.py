"""Checks of a run's configuration that need no model and no data, and write nothing."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path

from opslot._base.device import best_device, has_package
from opslot._base.errors import ConfigError, count_of, list_problems
from opslot._base.files import missing_path_hint, path_problem
from opslot._base.hub import is_repo_id, local_model, require_safetensors
from opslot._base.launcher import launched_rank, launched_world_size
from opslot.data.config import DataConfig
from opslot.data.sources import find_files, format_of
from opslot.trainer.commits import require_commits
from opslot.trainer.config import ModelConfig, RunConfig, TrainConfig
from opslot.trainer.lora_settings import check_lora
from opslot.trainer.output_folder import check_output, require_same_checkpoint
from opslot.trainer.output_lock import OutputLock
from opslot.trainer.paths import PATHS, paths_in
from opslot.trainer.prompts import prompt_of, prompt_problem
from opslot.trainer.train_settings import check_cuda_graphs, check_data_parallel_mode, check_optimizer

# NumPy seeds have 32 bits, and each rank adds its number.
_SEEDS = 2**31
# Beyond these a number is a mistake, of which the machine would run out of memory or never finish a step.
_LARGEST_BATCH, _MOST_WORKERS = 2**24, 1024
# Smallest and largest values; None is not checked.
_AT_LEAST = {
    "train.max_steps": 1,
    "train.global_batch_size": 1,
    "train.micro_batch_size": 1,
    "train.warmup_steps": 0,
    "train.weight_decay": 0,
    "train.max_grad_norm": 0,
    "train.seed": 0,
    "train.checkpoint.save_steps": 1,
    "train.checkpoint.save_total_limit": 1,
    "train.checkpoint.export_steps": 1,
    "train.eval_steps": 1,
    "train.optimizer.ns_steps": 1,
    "train.logging.log_steps": 1,
    "train.sp_size": 1,
    "train.ep_size": 1,
    "train.fsdp.dp_replicate": 1,
    "train.fsdp.prefetch": 0,
    "data.max_seq_len": 2,
    "data.num_workers": 0,
    "data.max_pixels": 1,
    "data.max_frames": 1,
    "evaluation.max_new_tokens": 1,
    "evaluation.early_stopping_patience": 1,
}
_AT_MOST = {
    "train.global_batch_size": _LARGEST_BATCH,
    "train.optimizer.decay_ratio": 1,
    "data.num_workers": _MOST_WORKERS,
}
# An update of AdamW is about the learning rate. With normal weights of standard deviation 0.02 to 0.05, a step of 5e-5
# leaves 43 to 75 % of them unchanged in bfloat16, one of 1e-5 84 to 94 %.
_LEAST_BFLOAT16_LR = 5e-5
_ABOVE_ZERO = (
    "train.lr",
    "train.num_epochs",
    "train.optimizer.eps",
    "train.optimizer.decay_ratio",
    "train.logging.peak_tflops",
    "data.max_fps",
)
# Fields whose values are in [0, 1).
_SHARES = (
    "train.optimizer.beta1",
    "train.optimizer.beta2",
    "train.optimizer.min_lr_ratio",
    "train.optimizer.momentum",
    "data.eval_fraction",
)


@dataclass(frozen=True)
class Source:
    """One data set of the training data.

    Attributes:
        name: its path as configured.
        weight: of the mixture; 1 without one.
    """

    name: str
    files: list[Path]
    weight: float = 1.0


@dataclass(frozen=True)
class RunInputs:
    """Files and folders that a valid configuration refers to.

    Attributes:
        config_path, tokenizer_path: with defaults resolved.
        model_path: the checkpoint to start from, or None; `validate_data` leaves out weights of the Hugging Face hub.
        sources: the training data; more than one for a mixture.
        eval_files: existing files; empty without `data.eval_path`.
        checkpoint: folder to resume from, or None to start at step 1.
        warnings: settings that have no effect, or a harmful one.
    """

    config_path: Path
    tokenizer_path: Path
    model_path: Path | None
    sources: list[Source]
    eval_files: list[Path]
    checkpoint: Path | None
    warnings: list[str]


def validate(config: RunConfig) -> RunInputs:
    """Check `config` against itself, the files and this machine; writes nothing.

    Raises:
        ConfigError: all problems found, one per line; or another run writes to the output folder.
    """
    problems: list[str] = []
    inputs = _check_inputs(config, problems)
    _check_processes(config, problems)
    check_data_parallel_mode(config.train, problems)
    checkpoint = check_output(config.train, problems)
    for package in ("wandb", "trackio"):
        if getattr(config.train.logging, package) and not has_package(package):
            problems.append(
                f"train.logging.{package} is on, but {package} is not installed; pip install {package}, or turn it off"
            )
    if problems:
        raise _cannot_start(problems)
    if launched_rank() == 0:
        OutputLock(Path(config.train.output_dir)).require_free()
    require_same_checkpoint(config.train, checkpoint)
    require_commits(config)
    files = [file for source in inputs.sources for file in source.files] + inputs.eval_files
    formats = {format_of(file, config.data.format) for file in files}
    # Last, since weights of the hub take long.
    model_path = local_model(config.model.model_path) if config.model.model_path else None
    return replace(inputs, model_path=model_path, checkpoint=checkpoint, warnings=_no_effect(config, formats))


def validate_data(config: RunConfig) -> RunInputs:
    """As `validate`, for commands that only read the data: processes and output folder are not checked.

    Raises:
        ConfigError: all problems found, one per line.
    """
    problems: list[str] = []
    inputs = _check_inputs(config, problems)
    if problems:
        raise _cannot_start(problems)
    return inputs


def _check_inputs(config: RunConfig, problems: list[str]) -> RunInputs:
    _check_paths(config, problems)
    if problems:
        raise _cannot_start(problems)
    _check_numbers(config, problems)
    config_path, tokenizer_path, model_path = _check_model(config.model, problems)
    _check_task(config, problems)
    check_lora(config, problems)
    check_optimizer(config, problems)
    data = config.data
    sources = _sources(data, problems)
    eval_files = find_files(data.eval_path, "data.eval_path", problems, data.format) if data.eval_path else []
    return RunInputs(config_path, tokenizer_path, model_path, sources, eval_files, None, [])


def _cannot_start(problems: list[str]) -> ConfigError:
    return ConfigError(list_problems(f"the run cannot start, {count_of(problems)}", problems, shown=30))


def data_parallel_size(train: TrainConfig) -> int:
    """Processes, or groups of `sp_size` processes, that train on different samples."""
    return max(1, launched_world_size() // train.sp_size)


def micro_batch_size(train: TrainConfig) -> int:
    """Samples per forward pass of one process."""
    return train.micro_batch_size or max(1, train.global_batch_size // data_parallel_size(train))


def _check_paths(config: RunConfig, problems: list[str]) -> None:
    """Paths that no file can have."""
    found = ((field, path_problem(path)) for field, path in paths_in(config, PATHS))
    problems += [f"{field}: {problem}" for field, problem in found if problem]


def _no_effect(config: RunConfig, formats: set[str | None]) -> list[str]:
    """Settings that change nothing in this run, whose data files have `formats`."""
    train, data = config.train, config.data
    warnings = []
    only = {
        ("sft", "vlm"): ("chat_template", "train_on"),
        ("classification",): ("label_field", "label_names"),
        ("vlm",): ("max_pixels", "max_frames", "max_fps", "use_audio_in_video", "media_dir"),
        ("pretrain", "classification"): ("text_field",),
        ("pretrain", "sft", "vlm"): ("append_eos",),
        ("sft", "vlm", "classification"): ("long_samples", "on_bad_sample"),
    }
    for tasks, names in only.items():
        warnings += [
            f"data.{name} has no effect on task {config.task}; it is for task {' or '.join(tasks)}"
            for name in names
            if config.task not in tasks and getattr(data, name) != getattr(DataConfig, name)
        ]
    warnings += _unused(config, formats)
    if train.max_steps is not None and train.warmup_steps > train.max_steps:
        warnings.append(
            f"train.warmup_steps={train.warmup_steps} exceeds train.max_steps={train.max_steps}, so the learning rate "
            "never reaches train.lr"
        )
    if config.model.torch_dtype == "bfloat16" and config.lora.r is None and (train.lr or math.inf) < _LEAST_BFLOAT16_LR:
        warnings.append(
            f"model.torch_dtype=bfloat16 rounds most updates of train.lr={train.lr:g} away; leave it float32, which "
            "computes in train.fsdp.param_dtype all the same, or save memory with lora.r or adamw_8bit"
        )
    return warnings


def _unused(config: RunConfig, formats: set[str | None]) -> Iterator[str]:
    """Fields that only count together with others, of which one has another value."""
    train, data, logging = config.train, config.data, config.train.logging
    on_cpu = config.model.device == "cpu" or best_device().type == "cpu"
    unless = {
        "data.eval_path": ("without train.eval_steps", train.eval_steps),
        "data.eval_fraction": (
            "with data.eval_path" if data.eval_path else "without train.eval_steps",
            train.eval_steps and not data.eval_path,
        ),
        "data.sample_by": ("on files that are not plain text", "text" in formats),
        "data.text_field": ("on plain text files", formats != {"text"}),
        "evaluation.max_new_tokens": ("without evaluation.prompts", config.evaluation.prompts),
        "evaluation.best_metric": ("without train.eval_steps", train.eval_steps),
        "train.num_epochs": ("with train.max_steps", train.max_steps is None),
        "train.optimizer.min_lr_ratio": ("with train.lr_scheduler=constant", train.lr_scheduler != "constant"),
        "train.optimizer.decay_ratio": (
            "without train.lr_scheduler=warmup_stable_decay",
            train.lr_scheduler == "warmup_stable_decay",
        ),
        "train.fsdp.copy_engine": ("on a CPU", not (train.fsdp.copy_engine and on_cpu)),
        "train.fsdp.prefetch": ("with train.data_parallel_mode=ddp", train.data_parallel_mode != "ddp"),
        "train.fsdp.ulysses_overlap": ("with train.sp_size=1", train.sp_size > 1),
        "train.logging.wandb_project": (
            "without train.logging.wandb or train.logging.trackio",
            logging.wandb or logging.trackio,
        ),
        "train.logging.wandb_entity": ("without train.logging.wandb", logging.wandb),
        "train.logging.run_name": (
            "without train.logging.wandb or train.logging.trackio",
            logging.wandb or logging.trackio,
        ),
    }
    default = RunConfig()
    for name, (where, is_used) in unless.items():
        if not is_used and attrgetter(name)(config) != attrgetter(name)(default):
            yield f"{name} has no effect {where}"


def _check_numbers(config: RunConfig, problems: list[str]) -> None:
    train = config.train
    for name, least in _AT_LEAST.items():
        value = attrgetter(name)(config)
        if value is not None and not value >= least:
            default = attrgetter(name)(RunConfig())
            problems.append(f"{name}={value} must be at least {least}{', or null' if default is None else ''}")
    for name, most in _AT_MOST.items():
        value = attrgetter(name)(config)
        if value is not None and value > most:
            problems.append(f"{name}={value} must be at most {most}")
    given = {name: attrgetter(name)(config) for name in _ABOVE_ZERO}
    above_zero = {name: value for name, value in given.items() if value is not None}
    above_zero |= {f"train.lr_of.{name}": value for name, value in (train.lr_of or {}).items()}
    problems += [f"{name}={value} must be above 0" for name, value in above_zero.items() if not value > 0]
    finite = {**above_zero, "train.weight_decay": train.weight_decay}
    problems += [f"{name} must be finite" for name, value in finite.items() if value == math.inf]
    problems += _profile_problems(train)
    if train.warmup_steps > 1 and train.warmup_steps % 1:
        problems.append(f"train.warmup_steps={train.warmup_steps} must be a number of steps, or a fraction below 1")
    if train.seed >= _SEEDS:
        problems.append(f"train.seed={train.seed} must be below {_SEEDS}")
    for name in _SHARES:
        value = attrgetter(name)(config)
        if not 0 <= value < 1:
            problems.append(f"{name}={value} must be in [0, 1)")


def _profile_problems(train: TrainConfig) -> list[str]:
    steps = train.logging.profile
    if steps is None:
        return []
    found = f"train.logging.profile={steps}"
    if len(steps) != 2:
        return [f"{found} must be two steps, the first and the last one, e.g. [10, 12]"]
    if not 1 <= steps[0] <= steps[1]:
        return [f"{found}: the first step must be at least 1 and at most the last one"]
    if train.max_steps is not None and steps[1] > train.max_steps:
        return [f"{found}: the last step exceeds train.max_steps={train.max_steps}; profile earlier steps"]
    return []


def _sources(data: DataConfig, problems: list[str]) -> list[Source]:
    if data.train is None:
        files = find_files(data.train_path, "data.train_path", problems, data.format)
        return [Source("data.train_path", files)]
    if data.train_path:
        problems.append("data.train_path and data.train are both set; remove one of them")
    if not data.train:
        problems.append("data.train is empty; list {path, weight} for each data set")
    sources = []
    for number, entry in enumerate(data.train):
        field = f"data.train[{number}]"
        unknown = entry.keys() - {"path", "weight"}
        path, weight = entry.get("path"), entry.get("weight", 1.0)
        if unknown or not path:
            what = f"unknown fields {', '.join(map(str, unknown))}" if unknown else "no path"
            problems.append(f"{field}: {what}; each entry is {{path, weight}}")
        elif not all(isinstance(name, str) for name in (path if isinstance(path, list) else [path])):
            problems.append(f"{field}: path must be a file, a glob, a saved data set or a list of them, found {path!r}")
        elif isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
            problems.append(f"{field}: weight must be a number above 0, found {weight!r}")
        else:
            files = find_files(path, field, problems, data.format)
            sources.append(Source(path if isinstance(path, str) else ", ".join(path), files, float(weight)))
    repeated = {source.name for source in sources if [other.name for other in sources].count(source.name) > 1}
    problems += [f"data.train names {name} twice; add their weights" for name in sorted(repeated)]
    return sources


def _check_task(config: RunConfig, problems: list[str]) -> None:
    """Settings that the task cannot use."""
    data, evaluation, train = config.data, config.evaluation, config.train
    if config.task != "pretrain" and data.split_special_tokens:
        problems.append(f"data.split_special_tokens is for task pretrain, and task is {config.task}; remove it")
    if config.task == "classification":
        if train.sp_size > 1:
            problems.append("task classification cannot share sequences; set train.sp_size: 1")
        if data.max_tokens_per_batch is not None:
            problems.append("task classification does not pack; remove data.max_tokens_per_batch")
        if evaluation.prompts:
            problems.append("task classification generates nothing; remove evaluation.prompts")
    elif evaluation.best_metric != "loss":
        problems.append(f"evaluation.best_metric={evaluation.best_metric} is for task classification; set it to loss")
    for number, prompt in enumerate(evaluation.prompts or ()):
        if problem := prompt_problem(prompt):
            problems.append(f"evaluation.prompts[{number}] {problem}")
        elif prompt_of(prompt).media and config.task != "vlm":
            problems.append(f"evaluation.prompts[{number}] has media, and task is {config.task}; give a text alone")
    if evaluation.prompts and train.sp_size > 1:
        problems.append("evaluation.prompts does not support sequence parallelism; set train.sp_size: 1, or remove it")
    if train.eval_steps is None:
        for name in ("prompts", "save_best", "early_stopping_patience"):
            if getattr(evaluation, name):
                problems.append(f"evaluation.{name} needs train.eval_steps; set it")
    if config.model.export_excluded:
        if config.task != "vlm":
            problems.append(f"model.export_excluded is for task vlm, and task is {config.task}; remove it")
        if config.model.model_path is None:
            problems.append("model.export_excluded copies weights of model.model_path; set it, or remove the field")
    template = data.chat_template
    if template not in (None, "none"):
        if config.task not in ("sft", "vlm"):
            problems.append(f"data.chat_template is for tasks sft and vlm, and task is {config.task}; remove it")
        elif not Path(str(template)).is_file():
            problems.append(f"data.chat_template: no such file: {template}; set it to a Jinja template file, or none")


def _check_processes(config: RunConfig, problems: list[str]) -> None:
    from opslot.distributed import check_sizes

    train = config.train
    processes, sizes = launched_world_size(), (train.fsdp.dp_replicate, train.sp_size, train.ep_size)
    if min(sizes) < 1:
        return
    if train.cuda_graphs:
        check_cuda_graphs(config, problems)
    if processes == 1:
        for name, size in {"sp_size": train.sp_size, "ep_size": train.ep_size, "fsdp.dp_replicate": sizes[0]}.items():
            if size > 1:
                problems.append(
                    f"train.{name}={size} needs a multiple of {size} processes, but this run has 1; start it with "
                    f"torchrun --nproc-per-node {size} -m opslot train CONFIG.yaml, or set train.{name}: 1"
                )
    else:
        try:
            check_sizes(processes, sizes[0], sp=train.sp_size, ep=train.ep_size)
        except ConfigError as error:
            problems.append(f"{error} (dp_replicate is train.fsdp.dp_replicate, sp train.sp_size, ep train.ep_size)")
            return
    if config.data.max_tokens_per_batch is None:
        _check_batch(train, problems)
    else:
        _check_token_batch(config, problems)


def _check_token_batch(config: RunConfig, problems: list[str]) -> None:
    train, ranks = config.train, data_parallel_size(config.train)
    room, longest = config.data.max_tokens_per_batch or 0, config.data.max_seq_len
    if longest is not None and room < longest:
        problems.append(
            f"data.max_tokens_per_batch={room} is less than data.max_seq_len={longest}, the length of the longest "
            f"document; increase it to at least {longest}, or lower data.max_seq_len"
        )
    if train.micro_batch_size is not None:
        problems.append(
            f"train.micro_batch_size={train.micro_batch_size} and data.max_tokens_per_batch={room} both set the "
            "micro batch size; remove one of them"
        )
    if not config.data.packing:
        problems.append("data.max_tokens_per_batch packs documents, but data.packing is off; remove one of them")
    if train.global_batch_size < ranks:
        problems.append(
            f"train.global_batch_size={train.global_batch_size} is less than the {ranks} data-parallel ranks; "
            f"increase it to at least {ranks}"
        )


def _check_batch(train: TrainConfig, problems: list[str]) -> None:
    total, micro, ranks = train.global_batch_size, train.micro_batch_size, data_parallel_size(train)
    if min(total, micro or 1) < 1 or total > _LARGEST_BATCH:
        return
    if total % ranks:
        problems.append(
            f"train.global_batch_size={total} is not divisible by the {ranks} data-parallel ranks; "
            f"set it to a multiple of {ranks}"
        )
    elif micro and total % (micro * ranks):
        fits = [size for size in range(1, total // ranks + 1) if total // ranks % size == 0]
        on = f" on {ranks} data-parallel ranks" if ranks > 1 else ""
        problems.append(
            f"train.global_batch_size={total} is not a multiple of train.micro_batch_size={micro}{on}; "
            f"valid micro batch sizes: {', '.join(map(str, fits))}"
        )


def _check_model(model: ModelConfig, problems: list[str]) -> tuple[Path, Path, Path | None]:
    """Paths of the config, of the tokenizer and of the checkpoint."""
    import opslot.models  # noqa: F401  (registers the ops)
    from opslot.slots import OpsImplementationConfig

    given = {name: getattr(model, name) for name in ("config_path", "model_path", "tokenizer_path")}
    local = {name: _local(name, path, problems) for name, path in given.items() if path}
    model_path = local.get("model_path")
    config_path = local.get("config_path", model_path)
    if config_path is None:
        problems.append("neither model.config_path nor model.model_path is set; set one to a folder with config.json")
    tokenizer_path = local.get("tokenizer_path") or _first_with_tokenizer(model_path, config_path)
    if config_path is not None and tokenizer_path is None and config_path.exists():
        problems.append(
            f"model.tokenizer_path is not set, and there is no tokenizer.json beside {config_path}; "
            "set it to the tokenizer's folder"
        )
    try:
        OpsImplementationConfig.make(model.ops_implementation)
    except ConfigError as error:
        problems.append(f"model.{error}".replace("\n", "\n  "))
    except TypeError as error:
        problems.append(f"model.ops_implementation: {error}")
    return config_path or Path(), tokenizer_path or Path(), model_path


def _local(field: str, path: str, problems: list[str]) -> Path:
    """The path of a field; of a model of the hub, its folder without the weights."""
    try:
        if field == "model_path":
            require_safetensors(path)
        found = local_model(path, weights=False)
    except ConfigError as error:
        problems.append(f"model.{field}: {error}".replace("\n", "\n  "))
        return Path(path)
    if not found.exists():
        may_be_of_hub = os.sep not in path or is_repo_id(path.rstrip(os.sep))
        of_hub = "; a model of the Hugging Face hub is named ORG/NAME" if may_be_of_hub else ""
        problems.append(f"model.{field}: no such file or folder: {path}; {missing_path_hint(path)}{of_hub}")
    return found


def _first_with_tokenizer(*paths: Path | None) -> Path | None:
    for path in paths:
        if path is not None:
            folder = path if path.is_dir() else path.parent
            if any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tekken.json")):
                return folder
    return None
