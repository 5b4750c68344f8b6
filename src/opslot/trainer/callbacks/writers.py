"""Callbacks that write: metrics, TensorBoard, wandb, the loss curve, checkpoints and the final model."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from opslot._base.files import write_text
from opslot.trainer.callbacks.base import Callback, StepRecord

if TYPE_CHECKING:
    from opslot.trainer.base import BaseTrainer

METRICS_FILE = "metrics.jsonl"
HF_FOLDER = "hf"


def read_metrics(output_dir: Path, last_step: int | None = None) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl up to `last_step`; a line that a kill cut short is left out."""
    path = output_dir / METRICS_FILE
    rows: list[dict[str, Any]] = []
    for line in path.read_text().splitlines() if path.is_file() else []:
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if last_step is None or row["step"] <= last_step:
            rows.append(row)
    return rows


class EvaluationCallback(Callback):
    """Adds `eval_loss` (nats a token) to the record every `train.eval_steps` steps and at the last."""

    def on_step_end(self, trainer: BaseTrainer, record: StepRecord) -> None:
        every = trainer.config.train.eval_steps
        if every and (record.step % every == 0 or record.step == trainer.max_steps):
            record.extra["eval_loss"] = trainer.evaluate()


class MetricsCallback(Callback):
    """metrics.jsonl: one object a line; a resumed run first drops the lines after its checkpoint."""

    def __init__(self) -> None:
        self._file: IO[str] | None = None

    def on_train_start(self, trainer: BaseTrainer) -> None:
        kept = read_metrics(trainer.output_dir, trainer.step)
        path = trainer.output_dir / METRICS_FILE
        write_text(path, "".join(json.dumps(row) + "\n" for row in kept))
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def on_step_end(self, trainer: BaseTrainer, record: StepRecord) -> None:
        due = record.step % trainer.config.train.logging.log_steps == 0 or record.step == trainer.max_steps
        if self._file is not None and (due or "eval_loss" in record.extra):
            self._file.write(json.dumps(record.flat()) + "\n")

    def close(self, trainer: BaseTrainer) -> None:
        if self._file is not None:
            self._file.close()


class TensorBoardCallback(Callback):
    """The same measurements as TensorBoard event files."""

    def __init__(self) -> None:
        self._writer: Any = None

    def on_train_start(self, trainer: BaseTrainer) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Events after the checkpoint stay in the older file; purging hides them from the viewer.
        purge = trainer.step + 1 if trainer.step else None
        self._writer = SummaryWriter(str(trainer.output_dir / "tensorboard"), purge_step=purge)

    def on_step_end(self, trainer: BaseTrainer, record: StepRecord) -> None:
        for name, value in record.flat().items():
            if name != "step":
                self._writer.add_scalar(f"train/{name}", value, record.step)

    def close(self, trainer: BaseTrainer) -> None:
        if self._writer is not None:
            self._writer.close()


class WandbCallback(Callback):
    """The same measurements to Weights & Biases."""

    def __init__(self) -> None:
        self._run: Any = None

    def on_train_start(self, trainer: BaseTrainer) -> None:
        import wandb

        self._run = wandb.init(
            project=trainer.config.train.logging.wandb_project,
            dir=str(trainer.output_dir),
            config=asdict(trainer.config),
        )

    def on_step_end(self, trainer: BaseTrainer, record: StepRecord) -> None:
        self._run.log(record.flat(), step=record.step)

    def close(self, trainer: BaseTrainer) -> None:
        if self._run is not None:
            self._run.finish()


class CheckpointCallback(Callback):
    """A checkpoint every `train.save_steps` steps and at the end, asked for or not."""

    def __init__(self) -> None:
        self._saved: int | None = None

    def on_train_start(self, trainer: BaseTrainer) -> None:
        self._saved = trainer.step

    def on_step_end(self, trainer: BaseTrainer, record: StepRecord) -> None:
        every = trainer.config.train.save_steps
        if every and record.step % every == 0:
            self._save(trainer)

    def on_train_end(self, trainer: BaseTrainer, completed: bool) -> None:
        if trainer.step != self._saved:
            self._save(trainer)
        trainer.saver.wait()

    def _save(self, trainer: BaseTrainer) -> None:
        trainer.save_checkpoint()
        self._saved = trainer.step


class LossCurveCallback(Callback):
    """loss.png from metrics.jsonl, renewed with each checkpoint and at the end."""

    def on_step_end(self, trainer: BaseTrainer, record: StepRecord) -> None:
        every = trainer.config.train.save_steps
        if every and record.step % every == 0 and record.step != trainer.max_steps:
            self._draw(trainer)

    def on_train_end(self, trainer: BaseTrainer, completed: bool) -> None:
        self._draw(trainer)

    def _draw(self, trainer: BaseTrainer) -> None:
        from opslot.trainer.loss_curve import draw_loss_curve

        rows = read_metrics(trainer.output_dir)
        if rows:
            draw_loss_curve(
                rows, trainer.output_dir / "loss.png", title=trainer.title, reference=trainer.reference_loss
            )


class ExportCallback(Callback):
    """hf/: the trained model as plain Transformers loads it, with its tokenizer."""

    def on_train_end(self, trainer: BaseTrainer, completed: bool) -> None:
        from opslot.distributed import is_first_rank

        if completed:
            final = trainer.output_dir / HF_FOLDER
            unfinished = trainer.output_dir / f".unfinished-{HF_FOLDER}"
            if is_first_rank():
                shutil.rmtree(unfinished, ignore_errors=True)
            trainer.export(unfinished)
            if is_first_rank():
                shutil.rmtree(final, ignore_errors=True)
                unfinished.rename(final)
