"""The callback interface and the record of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from opslot.trainer.best import BestEvaluation
from opslot.trainer.config import RunConfig
from opslot.trainer.prompts import PromptValue
from opslot.trainer.saver import CheckpointSaver


class Trainer(Protocol):
    """What callbacks use of a `BaseTrainer`, where these members are documented."""

    config: RunConfig
    model: Any
    device: torch.device
    output_dir: Path
    saver: CheckpointSaver
    step: int
    max_steps: int | None
    expected_steps: float | None
    best: BestEvaluation

    @property
    def title(self) -> str: ...

    @property
    def reference_loss(self) -> float | None: ...

    def evaluate(self) -> dict[str, float]: ...

    def generate(self, prompts: Sequence[PromptValue], max_new_tokens: int) -> list[str]: ...

    def stop_early(self) -> None: ...

    def print(self, text: str) -> None: ...

    def export(self, folder: Path) -> None: ...

    def save_checkpoint(self) -> Any: ...


@dataclass
class StepRecord:
    """Measurements of one optimizer step.

    Attributes:
        step: number of the step; the first is 1.
        loss: mean cross entropy over the predicted tokens of the global batch, in nats.
        grad_norm: norm of all gradients before clipping.
        lr: learning rate of the step.
        tokens_per_s: tokens of the global batch per second of the step, without evaluation and saving.
        epoch: passes over the data after the step.
        tokens: tokens seen since the run's first step.
        memory_gib: peak memory of the GPU, or of this process on a CPU.
        tokens_per_s_per_gpu: `tokens_per_s` over the number of processes.
        tflops_per_gpu: model TFLOP/s of one process, from `opslot.count_flops`; recomputation is not counted.
        mfu: `tflops_per_gpu` over the peak of the GPU; None where the peak is unknown.
        data_wait: share of the step that rank 0 waited for its data.
        device_wait: share of the step that the host of rank 0 waited for the results of its GPU. Near 0 the GPU waits
            for the host.
        extra: further measurements, such as aux_loss and eval_loss.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens_per_s: float
    epoch: float
    tokens: int
    memory_gib: float
    tokens_per_s_per_gpu: float
    tflops_per_gpu: float
    mfu: float | None
    data_wait: float
    device_wait: float
    extra: dict[str, float] = field(default_factory=dict)

    def flat(self) -> dict[str, float]:
        """All measurements in one mapping."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "extra"}
        return {name: value for name, value in {**values, **self.extra}.items() if value is not None}


class Callback:
    """Base class of callbacks; its methods do nothing. Callbacks are called in the trainer's order."""

    def on_train_start(self, trainer: Trainer) -> None:
        """After everything is built and, on resume, restored; before the first step."""

    def on_step_end(self, trainer: Trainer, record: StepRecord) -> None:
        """After each optimizer step."""

    def on_train_end(self, trainer: Trainer, completed: bool) -> None:
        """After the last step (`completed`), or after the step in which a signal stopped the run."""

    def close(self, trainer: Trainer) -> None:
        """Always called last, also after an error; close files here."""
