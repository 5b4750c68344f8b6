"""Profile of chosen steps: a Chrome trace and a memory snapshot."""

from __future__ import annotations

from typing import Any

import torch

from opslot.trainer.callbacks.base import Callback, StepRecord, Trainer

PROFILE_FOLDER = "profile"
# Allocations and frees that a memory snapshot keeps.
_MEMORY_EVENTS = 1_000_000


class ProfileCallback(Callback):
    """Profiles the steps of `train.logging.profile` on every rank.

    Files are <output_dir>/profile/steps_<first>-<last>_rank<rank>.trace.json, for chrome://tracing or Perfetto, and on
    a GPU also .memory.pickle, for https://pytorch.org/memory_viz.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._profiler: Any = None
        self._from = 0

    def on_train_start(self, trainer: Trainer) -> None:
        first, last = _steps(trainer)
        if trainer.step >= last:
            trainer.print(
                f"train.logging.profile=[{first}, {last}]: nothing to profile, step {trainer.step} is done already"
            )
        elif trainer.step + 1 >= first:
            self._start(trainer)

    def on_step_end(self, trainer: Trainer, record: StepRecord) -> None:
        first, last = _steps(trainer)
        if self._profiler is not None and record.step == last:
            self._stop(trainer)
        elif self._profiler is None and record.step + 1 == first:
            self._start(trainer)

    def on_train_end(self, trainer: Trainer, completed: bool) -> None:
        first, last = _steps(trainer)
        if self._profiler is not None:
            trainer.print(f"train.logging.profile=[{first}, {last}]: the run ends at step {trainer.step}")
            self._stop(trainer)
        elif completed and trainer.step < first:
            trainer.print(
                f"train.logging.profile=[{first}, {last}]: nothing profiled, the run has {trainer.step} steps"
            )

    def close(self, trainer: Trainer) -> None:
        if self._profiler is not None:
            self._profiler.stop()
            _record_memory(False)

    def _start(self, trainer: Trainer) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        _record_memory(True)
        self._profiler = torch.profiler.profile(activities=activities, record_shapes=True)
        self._profiler.start()
        self._from = trainer.step + 1

    def _stop(self, trainer: Trainer) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._profiler.stop()
        folder = trainer.output_dir / PROFILE_FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        stem = f"steps_{self._from}-{trainer.step}_rank{self.rank}"
        trace = folder / f"{stem}.trace.json"
        self._profiler.export_chrome_trace(str(trace))
        self._profiler = None
        if torch.cuda.is_initialized():
            torch.cuda.memory._dump_snapshot(str(folder / f"{stem}.memory.pickle"))
            _record_memory(False)
        trainer.print(f"profile of steps {self._from} to {trainer.step}: {trace}")


def _steps(trainer: Trainer) -> tuple[int, int]:
    first, last = trainer.config.train.logging.profile or (0, 0)
    return first, last


def _record_memory(on: bool) -> None:
    """Record the allocations of the GPU, or stop recording them."""
    if torch.cuda.is_initialized():
        torch.cuda.memory._record_memory_history(enabled="all" if on else None, max_entries=_MEMORY_EVENTS)
