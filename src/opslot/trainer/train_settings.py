"""Checks of the section `train`: parallelism, CUDA graphs, optimizer; imports nothing heavy unless they need it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from opslot._base.device import best_device
from opslot._base.launcher import launched_world_size
from opslot.trainer.config import OptimizerConfig, RunConfig, TrainConfig


def check_data_parallel_mode(train: TrainConfig, problems: list[str]) -> None:
    """Settings that ddp excludes."""
    fsdp = train.fsdp
    given = {
        "ep_size": train.ep_size > 1,
        "fsdp.dp_replicate": fsdp.dp_replicate > 1,
        "fsdp.cpu_offload": fsdp.cpu_offload,
        "fsdp.reshard_after_forward": fsdp.reshard_after_forward is not None,
        "fsdp.copy_engine": bool(fsdp.copy_engine),
    }
    found = [f"train.{name}" for name, is_given in given.items() if is_given]
    if train.data_parallel_mode == "ddp" and found:
        problems.append(
            f"train.data_parallel_mode=ddp keeps all parameters on each process, which excludes {', '.join(found)}; "
            "set it to fsdp2, or remove the others"
        )


def check_cuda_graphs(config: RunConfig, problems: list[str]) -> None:
    """Settings that CUDA graphs exclude."""
    train = config.train
    excluded = {
        "model.device: cpu": config.model.device == "cpu" or best_device().type == "cpu",
        "task: vlm": config.task == "vlm",
        f"train.activation_checkpointing: {train.activation_checkpointing}": train.activation_checkpointing != "none",
        "train.sp_size": train.sp_size > 1,
        "train.ep_size": train.ep_size > 1,
        "train.data_parallel_mode: fsdp2": train.data_parallel_mode == "fsdp2",
    }
    found = [name for name, is_given in excluded.items() if is_given]
    if found:
        problems.append(
            f"train.cuda_graphs replays the layers of a text model on a GPU that holds them, which excludes "
            f"{', '.join(found)}; set train.compile instead"
        )


def is_sharded(train: TrainConfig) -> bool:
    """Whether parameters may be FSDP's."""
    if train.data_parallel_mode != "auto":
        return train.data_parallel_mode == "fsdp2"
    return launched_world_size() > 1 or train.fsdp.param_dtype is not None or train.fsdp.cpu_offload


def check_optimizer(config: RunConfig, problems: list[str]) -> None:
    """Settings of the optimizer and of activation memory that cannot work."""
    train, optimizer = config.train, config.train.optimizer
    problems += _group_problems(optimizer.groups)
    if optimizer.name != "muon":
        changed = [
            name
            for name in ("momentum", "nesterov", "ns_steps", "muon_lr_scale")
            if getattr(optimizer, name) != getattr(OptimizerConfig, name)
        ]
        problems += [f"train.optimizer.{name} is a setting of muon; set train.optimizer.name: muon" for name in changed]
    if optimizer.name != "adamw" and (kernel := _named_kernel(config.model.ops_implementation)):
        problems.append(
            f"model.ops_implementation: adamw_implementation={kernel!r} is a kernel of train.optimizer.name: adamw, "
            f"found {optimizer.name}; set it to adamw, or remove adamw_implementation"
        )
    if optimizer.name == "adamw_8bit":
        from opslot.optim.selection import eight_bit_problem

        is_gpu = config.model.device != "cpu" and best_device().type == "gpu"
        problem = eight_bit_problem(is_sharded(train), is_gpu)
        if problem:
            problems.append(f"train.optimizer.name: {problem}")
    if train.activation_offload and train.activation_checkpointing == "none":
        problems.append(
            "train.activation_offload copies the inputs of checkpointed layers; set train.activation_checkpointing to "
            "full or selective"
        )


def _named_kernel(ops_implementation: str | dict[str, Any] | None) -> str | None:
    """The kernel of AdamW's steps that the configuration names."""
    if not isinstance(ops_implementation, dict):
        return None
    name = ops_implementation.get("adamw_implementation")
    return None if name in (None, "auto", "eager") else str(name)


def _group_problems(groups: list[dict[str, Any]] | None) -> Iterator[str]:
    """What is wrong with `train.optimizer.groups`."""
    for number, group in enumerate(groups or []):
        field = f"train.optimizer.groups[{number}]"
        params = group.get("params")
        globs = params if isinstance(params, list) else [params]
        if unknown := group.keys() - {"params", "lr", "weight_decay"}:
            yield f"{field}: unknown fields {', '.join(map(str, unknown))}; each entry is {{params, lr, weight_decay}}"
        if not params or not all(isinstance(glob, str) for glob in globs):
            yield f"{field}: params must be a glob of parameter names or a list of globs, found {params!r}"
        for name in ("lr", "weight_decay"):
            value = group.get(name, 0.0)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                yield f"{field}: {name} must be a number of at least 0, found {value!r}"
