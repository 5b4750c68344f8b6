"""The error of a run that exceeds a GPU's memory, with the settings that lower its use."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from opslot._base.errors import TrainingError
from opslot.trainer.callbacks.base import Trainer
from opslot.trainer.config import OptimizerConfig, RunConfig
from opslot.trainer.validate import micro_batch_size

# Share of the memory above which smaller batches do not help.
_MOST_STATE = 0.8
# A GPU context takes up to a GiB of this process's own.
_OTHER_PROCESSES = 2 << 30


@contextlib.contextmanager
def memory_errors(trainer: Trainer) -> Iterator[None]:
    """Report an exhausted GPU as a TrainingError; `trainer` may not have a model yet."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        config: RunConfig = trainer.config
        free, total = torch.cuda.mem_get_info(trainer.device)
        others = total - free - torch.cuda.memory_reserved(trainer.device)
        model = getattr(trainer, "model", None)
        state = 0 if model is None or config.train.fsdp.cpu_offload else state_bytes(model, config.train.optimizer)
        found = [f"the GPU has {_gib(total)}"]
        if others > _OTHER_PROCESSES:
            found.append(f"other processes hold {_gib(others)} of it")
        if state:
            found.append(f"parameters, gradients and optimizer state take {_gib(state)}")
        found.append(_batch(config))
        wanted = re.search(r"Tried to allocate ([\d.]+ \w+)", str(error))
        raise TrainingError(
            f"step {trainer.step + 1}: out of GPU memory" + (f", allocating {wanted[1]}" if wanted else ""),
            found="; ".join(found),
            hint=", or ".join(_remedies(config, others, is_state=state > _MOST_STATE * total)),
        ) from error


def state_bytes(model: nn.Module, optimizer: OptimizerConfig) -> int:
    """Bytes of a rank's parameters, and of the gradients and the optimizer state of those that are trained."""
    total = 0
    for parameter in model.parameters():
        own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        size = own.numel() * own.element_size()
        moments = {"adamw_8bit": 2 * own.numel(), "muon": size}.get(optimizer.name, 2 * size)
        total += size + (size + moments if parameter.requires_grad else 0)
    return total


def _remedies(config: RunConfig, others: int, *, is_state: bool) -> Iterator[str]:
    """Settings that need less memory, those that cost least first."""
    train, data = config.train, config.data
    if others > _OTHER_PROCESSES:
        yield "end the other processes"
    if not is_state:
        if data.max_tokens_per_batch is not None:
            yield "lower data.max_tokens_per_batch"
        elif micro_batch_size(train) > 1:
            yield f"lower train.micro_batch_size ({micro_batch_size(train)}), with which a step accumulates gradients"
        if train.activation_checkpointing == "none":
            yield "set train.activation_checkpointing: full"
        elif not train.activation_offload:
            yield "set train.activation_offload: true"
        yield "lower data.max_seq_len"
    if config.lora.r is None:
        if train.optimizer.name in ("adamw", "adamw_torch"):
            yield "set train.optimizer.name: adamw_8bit"
        yield "train adapters (lora.r: 16)"
    elif config.lora.quantization is None:
        yield "set lora.quantization: nf4"
    yield "use more GPUs"


def _batch(config: RunConfig) -> str:
    if config.data.max_tokens_per_batch is not None:
        return f"micro batches have up to {config.data.max_tokens_per_batch:,} tokens"
    return f"micro batches have {micro_batch_size(config.train)} x {config.data.sample_length:,} tokens"


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
