"""Callbacks that write: metrics, TensorBoard, wandb, the loss curve, checkpoints and the final model."""

from __future__ import annotations

import importlib
import json
import math
import shutil
import uuid
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from opslot._base.files import write_text
from opslot._base.logging import get_logger
from opslot.distributed import is_first_rank, on_first_rank
from opslot.trainer.callbacks.base import Callback, StepRecord, Trainer
from opslot.trainer.exports import export_folder, exported_step, place_export
from opslot.trainer.output_folder import write_description
from opslot.trainer.prompts import PromptValue, prompt_of

logger = get_logger(__name__)

METRICS_FILE = "metrics.jsonl"
HF_FOLDER = "hf"
BEST_FOLDER = "hf_best"
SAMPLES_FILE = "samples.jsonl"
RUN_ID_FILE = "wandb_run_id"


def read_metrics(output_dir: Path) -> list[dict[str, Any]]:
    """Records of metrics.jsonl."""
    return [record for record in read_lines(output_dir / METRICS_FILE) if type(record.get("loss")) in (int, float)]


def read_lines(path: Path, last_step: float = math.inf) -> list[dict[str, Any]]:
    """JSON objects of steps up to `last_step`, one a line; other lines (cut by a kill, edited) are dropped."""
    found: list[dict[str, Any]] = []
    for line in path.read_bytes().splitlines() if path.is_file() else []:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and type(record.get("step")) is int and record["step"] <= last_step:
            found.append(record)
    return found


def _keep_lines(path: Path, last_step: int) -> None:
    """Remove the lines after a resumed step."""
    if path.is_file():
        kept = read_lines(path, last_step)
        write_text(path, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in kept))


class EvaluationCallback(Callback):
    """Every `train.eval_steps` steps and at the last one: metrics, samples, the best model, early stopping.

    Every rank runs it.
    """

    def on_train_start(self, trainer: Trainer) -> None:
        if is_first_rank():
            _keep_lines(trainer.output_dir / SAMPLES_FILE, trainer.step)
        if trainer.best.exported is not None and _saves_best(trainer):
            found = on_first_rank(lambda: _best_export(trainer))
            if found != _HAS_BEST:
                trainer.best.export_lost()
                trainer.print(f"{trainer.output_dir / BEST_FOLDER} {found}; the next evaluation writes it")

    def on_step_end(self, trainer: Trainer, record: StepRecord) -> None:
        every = trainer.config.train.eval_steps
        if not every or (record.step % every and record.step != trainer.max_steps):
            return
        options = trainer.config.evaluation
        metrics = trainer.evaluate()
        record.extra |= metrics
        if options.prompts:
            self._write_samples(trainer, record.step, options.prompts)
        patience = options.early_stopping_patience
        if trainer.best.update(record.step, metrics) and _saves_best(trainer):
            _export(trainer, BEST_FOLDER)
        if trainer.best.is_over(patience) and record.step != trainer.max_steps:
            trainer.print(
                f"stopping early: eval_{trainer.best.metric} has not improved in {trainer.best.since} evaluations; the "
                f"best was {trainer.best.value:.4f} at step {trainer.best.step}"
            )
            trainer.stop_early()

    def _write_samples(self, trainer: Trainer, step: int, prompts: Sequence[PromptValue]) -> None:
        answers = trainer.generate(prompts, trainer.config.evaluation.max_new_tokens)
        if not is_first_rank():
            return
        with (trainer.output_dir / SAMPLES_FILE).open("a", encoding="utf-8") as file:
            for prompt, answer in zip(map(prompt_of, prompts), answers, strict=True):
                media = {"media": [path for _, path in prompt.media]} if prompt.media else {}
                line = {"step": step, "prompt": prompt.text, **media, "answer": answer}
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
                trainer.print(f"  {prompt.label} -> {answer!r}")


_HAS_BEST = "has the best model"


def _saves_best(trainer: Trainer) -> bool:
    options = trainer.config.evaluation
    return options.save_best if options.save_best is not None else options.early_stopping_patience is not None


def _best_export(trainer: Trainer) -> str:
    """What hf_best/ of a resumed run has: an earlier process may have gone on after the resumed checkpoint."""
    if not (trainer.output_dir / BEST_FOLDER).is_dir():
        return "does not exist"
    step = exported_step(trainer.output_dir, BEST_FOLDER)
    if step is not None and step > trainer.step:
        return f"has the model of step {step}, after the resumed one"
    return _HAS_BEST


class MetricsCallback(Callback):
    """metrics.jsonl: one JSON object per line; a resumed run first drops the lines after its checkpoint."""

    def __init__(self) -> None:
        self._file: IO[str] | None = None

    def on_train_start(self, trainer: Trainer) -> None:
        path = trainer.output_dir / METRICS_FILE
        _keep_lines(path, trainer.step)
        self._file = _open_to_append(path)

    def on_step_end(self, trainer: Trainer, record: StepRecord) -> None:
        due = record.step % trainer.config.train.logging.log_steps == 0 or record.step == trainer.max_steps
        if self._file is not None and (due or "eval_loss" in record.extra):
            self._file = _restored(self._file, trainer)
            self._file.write(json.dumps(record.flat()) + "\n")

    def on_train_end(self, trainer: Trainer, completed: bool) -> None:
        if self._file is not None:
            self._file = _restored(self._file, trainer)

    def close(self, trainer: Trainer) -> None:
        if self._file is not None:
            self._file.close()


def _open_to_append(path: Path) -> IO[str]:
    return path.open("a+", encoding="utf-8", buffering=1)


def _restored(file: IO[str], trainer: Trainer) -> IO[str]:
    """The file itself, or a new one with its lines if it was deleted, beside a new description of the run."""
    path = trainer.output_dir / METRICS_FILE
    if path.exists():
        return file
    file.seek(0)
    lines = file.read()
    file.close()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_description(trainer.output_dir, trainer.config, trainer.model)
    write_text(path, lines)
    logger.warning("%s was deleted during the run; it is written again", path)
    return _open_to_append(path)


class TensorBoardCallback(Callback):
    """The metrics as TensorBoard event files."""

    def __init__(self) -> None:
        self._writer: Any = None

    def on_train_start(self, trainer: Trainer) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Events after the checkpoint remain in the older file; purge_step hides them in TensorBoard.
        purge = trainer.step + 1 if trainer.step else None
        self._writer = SummaryWriter(str(trainer.output_dir / "tensorboard"), purge_step=purge)

    def on_step_end(self, trainer: Trainer, record: StepRecord) -> None:
        for name, value in record.flat().items():
            if name != "step":
                self._writer.add_scalar(f"train/{name}", value, record.step)

    def close(self, trainer: Trainer) -> None:
        if self._writer is not None:
            self._writer.close()


class WandbCallback(Callback):
    """The metrics on Weights & Biases; a resumed run continues the same one there."""

    package = "wandb"

    def __init__(self) -> None:
        self._run: Any = None

    def on_train_start(self, trainer: Trainer) -> None:
        client = importlib.import_module(self.package)
        logging = trainer.config.train.logging
        name = logging.run_name or trainer.output_dir.resolve().name
        self._run = client.init(
            project=logging.wandb_project, name=name, config=asdict(trainer.config), **self.options(trainer)
        )

    def options(self, trainer: Trainer) -> dict[str, Any]:
        """Further arguments of the package's `init`."""
        path = trainer.output_dir / RUN_ID_FILE
        if not trainer.step or not path.is_file():
            # Another run in this folder has another id.
            write_text(path, uuid.uuid4().hex[:12])
        return {
            "entity": trainer.config.train.logging.wandb_entity,
            "dir": str(trainer.output_dir),
            "id": path.read_text().strip(),
            "resume": "allow",
        }

    def on_step_end(self, trainer: Trainer, record: StepRecord) -> None:
        self._run.log(record.flat(), step=record.step)

    def close(self, trainer: Trainer) -> None:
        if self._run is not None:
            self._run.finish()


class TrackioCallback(WandbCallback):
    """The metrics on Trackio, whose functions are those of wandb."""

    package = "trackio"

    def options(self, trainer: Trainer) -> dict[str, Any]:
        return {"resume": "allow"}


class CheckpointCallback(Callback):
    """A checkpoint every `train.checkpoint.save_steps` steps and at the end of the run."""

    def __init__(self) -> None:
        self._saved: int | None = None

    def on_train_start(self, trainer: Trainer) -> None:
        self._saved = trainer.step

    def on_step_end(self, trainer: Trainer, record: StepRecord) -> None:
        every = trainer.config.train.checkpoint.save_steps
        if every and record.step % every == 0:
            self._save(trainer)

    def on_train_end(self, trainer: Trainer, completed: bool) -> None:
        if trainer.step != self._saved:
            self._save(trainer)
        trainer.saver.wait()

    def _save(self, trainer: Trainer) -> None:
        trainer.save_checkpoint()
        self._saved = trainer.step


class LossCurveCallback(Callback):
    """loss.png from metrics.jsonl, drawn with each checkpoint and at the end of the run."""

    def on_step_end(self, trainer: Trainer, record: StepRecord) -> None:
        every = trainer.config.train.checkpoint.save_steps
        if every and record.step % every == 0 and record.step != trainer.max_steps:
            self._draw(trainer)

    def on_train_end(self, trainer: Trainer, completed: bool) -> None:
        self._draw(trainer)

    def _draw(self, trainer: Trainer) -> None:
        from opslot.trainer.loss_curve import draw_loss_curve

        records = read_metrics(trainer.output_dir)
        if records:
            draw_loss_curve(
                records, trainer.output_dir / "loss.png", title=trainer.title, reference=trainer.reference_loss
            )


class ExportCallback(Callback):
    """hf/: the trained model and its tokenizer, for Transformers' from_pretrained; hf_step_<step>/ every
    `train.checkpoint.export_steps` steps before.

    A run that had nothing left to train keeps an existing export. Otherwise files of the user in hf/ are kept.
    """

    def __init__(self) -> None:
        self._started_at = 0

    def on_train_start(self, trainer: Trainer) -> None:
        self._started_at = trainer.step

    def on_step_end(self, trainer: Trainer, record: StepRecord) -> None:
        every = trainer.config.train.checkpoint.export_steps
        if every and record.step % every == 0 and record.step != trainer.max_steps:
            _export(trainer, f"{HF_FOLDER}_step_{record.step:08}")

    def on_train_end(self, trainer: Trainer, completed: bool) -> None:
        if completed and not (trainer.step == self._started_at and on_first_rank(lambda: _has_export(trainer))):
            _export(trainer, HF_FOLDER)


def _has_export(trainer: Trainer) -> bool:
    """Whether hf/ has the model of this step: the run before may have been killed between checkpoint and export."""
    is_there = (trainer.output_dir / HF_FOLDER).is_dir()
    return is_there and exported_step(trainer.output_dir, HF_FOLDER) in (trainer.step, None)


def _export(trainer: Trainer, name: str) -> None:
    """Write the model to a folder of the run; every rank calls it."""
    folder = export_folder(trainer.output_dir, name)
    unfinished = folder.with_name(f".unfinished-{folder.name}")
    if is_first_rank():
        shutil.rmtree(unfinished, ignore_errors=True)
    trainer.export(unfinished)
    if is_first_rank():
        place_export(trainer.output_dir, name, unfinished, trainer.step)
