"""Process groups, dtypes, workers and memory of a run, and errors of its disk."""

from __future__ import annotations

import contextlib
import errno
import resource
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from opslot._base.device import best_device, has_package, usable_cores
from opslot._base.errors import ConfigError, TrainingError
from opslot._base.launcher import launched_local_world_size
from opslot._base.logging import get_logger
from opslot.checkpoint.adapters import FROM_WEIGHTS
from opslot.distributed import ParallelState, init_parallel_state
from opslot.distributed.copy_engine import opened_bytes
from opslot.trainer.config import RunConfig
from opslot.trainer.paths import with_home

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# errno values of a disk that is full, read-only or failing.
_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO}
_TEXT_WORKERS, _MEDIA_WORKERS = 2, 8
# Peak learning rates for random weights, for those of a checkpoint, and for adapters.
_LR, _LR_OF_CHECKPOINTS, _LR_OF_ADAPTERS = 3e-4, 1e-5, 2e-4
# Of two batches of ten images of 1024 x 1024.
_MEDIA_WORKER_BYTES = 256 << 20

logger = get_logger(__name__)


def with_defaults(config: RunConfig) -> RunConfig:
    """`config` with "~" expanded, and with `train.fsdp.param_dtype` and `train.lr` set, whose defaults depend on other
    fields and the GPU."""
    config = _with_default_precision(with_home(config))
    if config.train.lr is not None:
        return config
    lr = _LR if config.model.model_path is None else _LR_OF_CHECKPOINTS
    lr = lr if config.lora.r is None else _LR_OF_ADAPTERS
    return replace(config, train=replace(config.train, lr=lr))


def _with_default_precision(config: RunConfig) -> RunConfig:
    """Where it is not set, parameters in float32 are computed with in bfloat16 on a GPU that supports it, unless a
    setting needs parameters that are not sharded."""
    fsdp, model = config.train.fsdp, config.model
    if fsdp.param_dtype is not None or model.torch_dtype != "float32" or model.device == "cpu":
        return config
    whole_state = config.train.optimizer.name == "adamw_8bit" and not has_package("torchao")
    whole_state &= config.train.data_parallel_mode != "ddp"
    if config.lora.init in FROM_WEIGHTS or whole_state:
        return config
    capability = best_device().capability
    if capability is None or capability < (8, 0):
        return config
    return replace(config, train=replace(config.train, fsdp=replace(fsdp, param_dtype="bfloat16")))


def dtype_of_weights(config: RunConfig) -> str:
    """The dtype in which a model's weights are built: of weights that adapters leave frozen, that of the computation.

    They would be cast to it in every forward pass.
    """
    adapted = config.lora.r is not None and config.train.fsdp.param_dtype
    return adapted or config.model.torch_dtype


def start_processes(config: RunConfig) -> ParallelState:
    """Create the process group and device meshes of a run; returns their state if they exist already.

    Raises:
        ConfigError: sizes that do not fit the processes.
    """
    train, fsdp = config.train, config.train.fsdp
    return init_parallel_state(
        dp_replicate=fsdp.dp_replicate,
        sp=train.sp_size,
        ep=train.ep_size,
        device_type=None if config.model.device == "auto" else config.model.device,
        group_of_one=fsdp.param_dtype is not None or fsdp.cpu_offload or train.data_parallel_mode == "fsdp2",
    )


def require_trainable_dtype(model: PreTrainedModel) -> None:
    """Reject float16 parameters: AdamW's updates and second moments underflow in float16."""
    half = next((name for name, p in model.named_parameters() if p.requires_grad and p.dtype == torch.float16), None)
    if half is not None:
        raise ConfigError(
            "float16 parameters cannot be trained: optimizer updates underflow",
            found=f"{half} is float16",
            hint="set model.torch_dtype: float32 with train.fsdp.param_dtype: float16 or bfloat16, or "
            "model.torch_dtype: bfloat16",
        )


def input_dtype(config: RunConfig) -> torch.dtype:
    """What the model casts floating-point inputs to: the dtype of its weights, then that of the computation.

    Called with a configuration that `with_defaults` returned.
    """
    weights = dtype_of_weights(config)
    computed = config.train.fsdp.param_dtype if weights == "float32" else None
    return getattr(torch, computed or weights)


def num_workers(config: RunConfig) -> int:
    """`data.num_workers`; by default 2 beside a GPU, 8 for media, or what the process's share of cores and /dev/shm
    allows.

    Workers pass batches through /dev/shm, which is small in some containers (64 MiB with Docker's defaults).
    """
    if config.data.num_workers is not None:
        return config.data.num_workers
    if config.model.device == "cpu" or best_device().type == "cpu":
        return 0
    processes = launched_local_world_size()
    limits = [_MEDIA_WORKERS if config.task == "vlm" else _TEXT_WORKERS, max(usable_cores() // processes - 1, 0)]
    if config.task == "vlm" and (shared := Path("/dev/shm")).is_dir():
        free = shutil.disk_usage(shared).free
        limits.append(free // processes // _MEDIA_WORKER_BYTES)
        if limits[-1] == 0:
            logger.warning(
                "data.num_workers is 0, since /dev/shm has %d MiB for the batches of workers; start the container with "
                "a larger one (--shm-size or --ipc=host), or set data.num_workers",
                free >> 20,
            )
    return min(limits)


def dtype_of(name: str | None) -> torch.dtype | None:
    """The torch dtype of a configuration field; None where it is not set."""
    return None if name is None else getattr(torch, name)


def peak_memory(device: torch.device) -> float:
    """GiB: of the GPU's allocator and of memory opened from other GPUs, else of this process."""
    if device.type == "cuda":
        return (torch.cuda.max_memory_allocated(device) + opened_bytes()) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


@contextlib.contextmanager
def disk_errors(output_dir: Path) -> Iterator[None]:
    """Report a full or failing disk as a TrainingError."""
    try:
        yield
    except OSError as error:
        if error.errno not in _DISK_ERRORS:
            raise
        file = f" ({error.filename})" if error.filename else ""
        raise TrainingError(
            f"the run's files cannot be written to {output_dir}: {error.strerror}{file}",
            hint="free disk space, then continue with train.checkpoint.resume_from: latest; checkpoints are intact",
        ) from error
