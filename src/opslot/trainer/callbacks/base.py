"""The callback interface and the record of a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opslot.trainer.base import BaseTrainer


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
    extra: dict[str, float] = field(default_factory=dict)

    def flat(self) -> dict[str, float]:
        """All measurements in one mapping."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "extra"}
        return {name: value for name, value in {**values, **self.extra}.items() if value is not None}


class Callback:
    """Base class of callbacks; its methods do nothing. Callbacks are called in the trainer's order."""

    def on_train_start(self, trainer: BaseTrainer) -> None:
        """After everything is built and, on resume, restored; before the first step."""

    def on_step_end(self, trainer: BaseTrainer, record: StepRecord) -> None:
        """After each optimizer step."""

    def on_train_end(self, trainer: BaseTrainer, completed: bool) -> None:
        """After the last step (`completed`), or after the step in which a signal stopped the run."""

    def close(self, trainer: BaseTrainer) -> None:
        """Always called last, also after an error; close files here."""
