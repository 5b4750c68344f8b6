"""Checks of `train.data_parallel_mode` and `train.cuda_graphs`; imports nothing heavy."""

from __future__ import annotations

from opslot._base.device import best_device
from opslot._base.launcher import launched_world_size
from opslot.trainer.config import RunConfig, TrainConfig


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
