"""A hint for runs whose GPU waits for the host."""

from __future__ import annotations

import statistics

from opslot.trainer.callbacks.base import Callback, StepRecord, Trainer
from opslot.trainer.train_settings import check_cuda_graphs

# The first steps compile and allocate.
_SKIPPED, _MEASURED = 3, 8
# Share of the step that the host waits for data or the GPU, below which the GPU waits for the host.
_LEAST_WAIT = 0.05


class HostBoundCallback(Callback):
    """Prints a hint, once, where the host takes longer to launch a step's kernels than the GPU to run them."""

    def __init__(self) -> None:
        self._waits: list[float] = []

    def on_step_end(self, trainer: Trainer, record: StepRecord) -> None:
        if len(self._waits) == _SKIPPED + _MEASURED:
            return
        self._waits.append(record.data_wait + record.device_wait)
        if len(self._waits) == _SKIPPED + _MEASURED and statistics.median(self._waits[_SKIPPED:]) < _LEAST_WAIT:
            trainer.print(f"the GPU waits for the host in each step; {_hint(trainer)}")


def _hint(trainer: Trainer) -> str:
    problems: list[str] = []
    check_cuda_graphs(trainer.config, problems)
    if trainer.config.train.cuda_graphs or problems:
        return "larger micro batches (train.micro_batch_size) use it better"
    return "train.cuda_graphs: true makes such steps faster, and so do larger micro batches (train.micro_batch_size)"
