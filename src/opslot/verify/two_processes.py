"""One training step on two processes (gloo), for `check_architecture`: FSDP2, sequence or expert parallelism."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from opslot._base.errors import ConfigError, error_text
from opslot.distributed import destroy_parallel_state, init_parallel_state, shard_sequence, sum_over_ranks
from opslot.models import apply
from opslot.models.parallelize import parallelize
from opslot.verify.isolated import Lost, Processes
from opslot.verify.random_model import random_model, train_step

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

WORLD = 2
SIZES: dict[str, dict[str, Any]] = {"fsdp": {}, "sp": {"sp": WORLD}, "ep": {"ep": WORLD}}
_LIMIT = 180.0


@dataclass(frozen=True, eq=False)
class _Task:
    """The step of one rank."""

    rank: int
    port: int
    check: str
    config: PreTrainedConfig
    ops: Any
    batches: list[dict[str, Any]]


@dataclass(frozen=True)
class RankResult:
    """What a rank returns.

    Attributes:
        values: loss and whole gradients, summed over ranks.
        unsupported: why the model cannot be parallelized so.
        error: why the step failed.
    """

    values: Mapping[str, np.ndarray] | None = None
    unsupported: str = ""
    error: str = ""


def two_process_step(
    check: str,
    config: PreTrainedConfig,
    ops: Any,
    processes: Processes,
    batches: Sequence[list[dict[str, Any]]],
) -> RankResult:
    """The step of a tiny random model on two processes.

    Args:
        check: a key of `SIZES`.
        processes: two of them.
        batches: those of each process, or of one whose rows, or sequences, are shared.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    tasks = [_Task(rank, port, check, config, ops, _share(check, batches, rank)) for rank in range(WORLD)]
    results = [result for _, result in processes.run(_rank_step, tasks, lambda r: bool(r.error), _LIMIT)]
    lost = next((result for result in results if isinstance(result, Lost)), None)
    failed = next((r for r in results if isinstance(r, RankResult) and (r.error or r.unsupported)), None)
    if failed is not None:
        return failed
    if lost is not None:
        return RankResult(error=f"a process {lost}")
    return next(result for result in results if isinstance(result, RankResult) and result.values)


def _share(check: str, batches: Sequence[list[dict[str, Any]]], rank: int) -> list[dict[str, Any]]:
    """The batches of a rank: global sequences, which sp shards, else its own, or its row of each."""
    if check == "sp":
        return [batch for own in batches for batch in own]
    if len(batches) == WORLD:
        return batches[rank]
    row = slice(rank, rank + 1)
    return [{name: value[row] if value.dim() else value for name, value in batch.items()} for batch in batches[0]]


def _rank_step(task: _Task) -> RankResult:
    environment = {"RANK": task.rank, "LOCAL_RANK": task.rank, "WORLD_SIZE": WORLD, "MASTER_PORT": task.port}
    os.environ.update({name: str(value) for name, value in environment.items()}, MASTER_ADDR="127.0.0.1")
    torch.set_num_threads(1)
    try:
        state = init_parallel_state(device_type="cpu", **SIZES[task.check])
        model = random_model(task.config).eval()
        apply(model, task.ops)
        try:
            parallelize(model, state)
        except ConfigError as error:
            return RankResult(unsupported=str(error).splitlines()[0])
        values = train_step(model, [shard_sequence(batch, state) for batch in task.batches])
        values["loss"] = torch.tensor(sum_over_ranks(float(values["loss"]))[0])
        return RankResult({name: value.numpy() for name, value in values.items()} if task.rank == 0 else {})
    except Exception as error:
        return RankResult(error=error_text(f"{type(error).__name__}: {error}"))
    finally:
        destroy_parallel_state()
