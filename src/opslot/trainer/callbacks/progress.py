"""Training progress: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from opslot.trainer.callbacks.base import Callback, StepRecord, Trainer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID


_SECONDS_BETWEEN_LINES = 5.0
# Share of a step that it waited for data.
_SHOWN_WAIT = 0.01


class ProgressCallback(Callback):
    """Prints loss, throughput, memory and remaining time.

    Args:
        console: where to print; with `progress: auto`, a terminal gets a bar and anything else lines.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._started = 0.0
        self._clock_from: int | None = None
        self._last_line = 0.0

    def on_train_start(self, trainer: Trainer) -> None:
        wanted = trainer.config.train.logging.progress
        if wanted == "bar" or (wanted == "auto" and self.console.is_terminal):
            self._bar = _make_bar(self.console)
            self._task = self._bar.add_task(
                "training", total=trainer.expected_steps, completed=trainer.step, loss=float("nan"), speed="", memory=""
            )
            self._bar.start()

    def on_step_end(self, trainer: Trainer, record: StepRecord) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.update(
                self._task,
                total=_rounded(trainer.expected_steps),
                completed=record.step,
                loss=record.loss,
                speed=_speed(record),
                memory=f"{record.memory_gib:.1f} GiB{_waiting(record)}",
            )
            if "eval_loss" in record.extra:
                evaluated = "".join(f"  {n}: {v:.4f}" for n, v in record.extra.items() if n.startswith("eval_"))
                self._bar.console.print(f"step: {record.step}{evaluated}", highlight=False)
            return
        now = time.monotonic()
        if self._clock_from is None:
            # The first step includes imports and compilation, so it is not part of the estimate.
            self._started, self._clock_from = now, record.step
        due = record.step in (self._clock_from, trainer.max_steps) or "eval_loss" in record.extra
        if due or now - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._last_line = now
            self.console.print(self._line(trainer, record), highlight=False, soft_wrap=True)

    def close(self, trainer: Trainer) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _line(self, trainer: Trainer, record: StepRecord) -> str:
        assert self._clock_from is not None
        spent, done = time.monotonic() - self._started, record.step - self._clock_from
        expected = _rounded(trainer.expected_steps)
        about = "~" if trainer.max_steps is None else ""
        extra = "".join(f"  {name}: {value:.4f}" for name, value in record.extra.items())
        line = (
            f"step: {record.step}/{about}{expected}  loss: {record.loss:.4f}{extra}  "
            f"grad_norm: {record.grad_norm:.4f}  "
            f"lr: {record.lr:.2e}  {_speed(record)}  {record.memory_gib:.2f} GiB{_waiting(record)}"
        )
        return f"{line}  eta: {_clock(spent / done * (expected - record.step))}" if done and expected else line


def _make_bar(console: Console) -> Progress:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("loss [bold]{task.fields[loss]:.3f}"),
        TextColumn("[cyan]{task.fields[speed]}"),
        TextColumn("[magenta]{task.fields[memory]}"),
        TimeElapsedColumn(),
        TextColumn("eta"),
        TimeRemainingColumn(),
        console=console,
        refresh_per_second=4,
    )


def _speed(record: StepRecord) -> str:
    """Throughput, per GPU where there are several, with the MFU where the peak is known."""
    several = record.tokens_per_s_per_gpu < record.tokens_per_s
    speed = f"{record.tokens_per_s:,.0f} tokens/s"
    if several:
        speed += f" ({record.tokens_per_s_per_gpu:,.0f} per GPU)"
    if record.mfu is not None:
        speed += f"  {record.tflops_per_gpu:,.0f} TFLOP/s  MFU: {record.mfu:.1%}"
    return speed


def _waiting(record: StepRecord) -> str:
    return f"  data wait: {record.data_wait:.0%}" if record.data_wait >= _SHOWN_WAIT else ""


def _rounded(steps: float | None) -> int | None:
    return None if steps is None else round(steps)


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
