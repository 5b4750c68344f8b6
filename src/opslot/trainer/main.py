"""`opslot train`."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opslot._base.errors import CheckpointError, OpslotError, OtherRankFailed, ParallelError, TrainingError
from opslot._base.launcher import (
    exit_with_launcher,
    is_first_local_rank,
    launched_by_torchrun,
    launched_world_size,
)
from opslot.trainer.parse import build_parser, load_config
from opslot.trainer.stopping import StoppedBeforeTraining, stopped_by_signals

if TYPE_CHECKING:
    from rich.console import Console

    from opslot.trainer.base import TrainResult
    from opslot.trainer.config import RunConfig
    from opslot.trainer.text import TextTrainer

_LABELS_SHOWN = 20
# With fewer optimizer steps, the default learning rates hardly change a model.
_FEW_STEPS = 20
# Ranks of a machine reach an error that they have in common at most this much apart: they import torch first.
_LEAD_SECONDS = 10.0


def cli_train(argv: Sequence[str]) -> int:
    """Run `opslot train` with the given arguments.

    Returns:
        0: the run is complete; 1: it failed during training; 2: wrong usage or bad input; 130 or 143: stopped by SIGINT
        or SIGTERM, with a checkpoint if training had started.
    """
    arguments = [argument for argument in argv if argument != "--traceback"]
    if not arguments or {"-h", "--help", "--help-all"} & set(arguments):
        build_parser(every_field="--help-all" in arguments).print_help(sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    try:
        with stopped_by_signals():
            exit_with_launcher()
            wait_without_spinning()
            # Outside of `_reported_by_first_rank`: an invalid environment does not give the rank of this process.
            launched_world_size()
            with _reported_by_first_rank():
                config = load_config(arguments)
        _, result = run(config)
    except OtherRankFailed:
        return 1
    except OpslotError as error:
        if len(arguments) < len(argv):
            traceback.print_exc()
        print(f"opslot: error: {error}", file=sys.stderr)
        return 1 if isinstance(error, TrainingError | ParallelError) else 2
    except StoppedBeforeTraining as stop:
        if is_first_local_rank():
            print(f"opslot: stopped by {stop} before training started; no checkpoint was written", file=sys.stderr)
        return 128 + stop.signal
    except KeyboardInterrupt:
        print("opslot: interrupted; the last checkpoint is intact", file=sys.stderr)
        return 128 + signal.SIGINT
    return 128 + result.signal if result.signal else 0


def wait_without_spinning() -> None:
    """Let idle OpenMP threads sleep, unless the user has set OMP_WAIT_POLICY; no effect after torch is imported.

    OpenMP's default is to spin for milliseconds at the end of each parallel loop. Where another process also needs a
    core, a spinning thread keeps the one it waits for from running: with one busy neighbor on two cores, the demo's
    step was measured 10 to 30 times slower.
    """
    if "torch" not in sys.modules:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def run(config: RunConfig, console: Console | None = None) -> tuple[TextTrainer, TrainResult]:
    """Train with `config`, and print progress and results.

    Under torchrun every process calls it; rank 0 prints, and all ranks end when one fails.
    """
    with stopped_by_signals():
        from opslot.distributed import destroy_parallel_state, fail_together
        from opslot.trainer.display import make_console
        from opslot.trainer.setup import start_processes, with_defaults

        config = with_defaults(config)
        console = console or make_console()
        with _logging_to(console), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            if launched_world_size() > 1:
                # Before anything that may fail on one rank only.
                with _reported_by_first_rank():
                    start_processes(config)
            try:
                with fail_together():
                    done = _train(_prepare(config, console))
            except BaseException:
                # Several processes leave their group to the exit: destroying it may wait for one that was killed.
                if launched_world_size() == 1:
                    destroy_parallel_state()
                raise
            destroy_parallel_state()
            return done


def _prepare(config: RunConfig, console: Console) -> TextTrainer:
    """The trainer of a run, which prints what it trains."""
    from opslot.slots import explain

    trainer = _trainer_class(config.task)(config, console=console)
    config = trainer.config
    kernels = explain(trainer.model)
    if len(kernels):
        # Without the rejected kernels, which are in kernels.txt.
        trainer.print(str(kernels).partition("\n\n")[0] + "\n")
    processes = f" x {trainer.state.world_size} ({trainer.state})" if trainer.state.world_size > 1 else ""
    size = "at most " if config.data.max_tokens_per_batch else ""
    if trainer.max_steps is None:
        steps = f"{config.train.num_epochs:g} epochs in steps"
    else:
        steps = _steps(max(0, trainer.max_steps - trainer.step))
    trainer.print(
        f"{trainer.title} on {trainer.device}{processes}; {trainer.data.describe()}; {steps} of "
        f"{size}{config.train.global_batch_size * config.data.sample_length:,} tokens"
    )
    for line in (*trainer.meter.uncounted_lines(), *_few_steps(trainer), *_unused_gpus(trainer)):
        trainer.print(line)
    return trainer


def _steps(count: int) -> str:
    return f"{count:,} step{'' if count == 1 else 's'}"


def _few_steps(trainer: TextTrainer) -> Iterator[str]:
    """A warning where packing leaves few steps: each has more samples than `global_batch_size` in other trainers."""
    train, steps = trainer.config.train, trainer.max_steps
    packs = trainer.config.data.packing and trainer.config.task != "classification"
    if packs and train.max_steps is None and steps is not None and steps < _FEW_STEPS:
        documents = sum(corpus.num_documents() for corpus in trainer.data.corpora) * train.num_epochs / steps
        if documents > train.global_batch_size:
            yield (
                f"warning: the run has few steps, since each packs about {documents:,.0f} documents; lower "
                "train.global_batch_size or raise train.num_epochs for more"
            )


def _unused_gpus(trainer: TextTrainer) -> Iterator[str]:
    """A line where a run without a launcher leaves GPUs of this machine idle."""
    import torch

    gpus = torch.cuda.device_count() if trainer.device.type == "cuda" else 0
    if gpus > 1 and trainer.state.world_size == 1:
        yield f"trains on 1 of {gpus} GPUs; start it with torchrun --nproc-per-node {gpus} -m opslot train to use all"


def _train(trainer: TextTrainer) -> tuple[TextTrainer, TrainResult]:
    from opslot.trainer.callbacks.writers import BEST_FOLDER, HF_FOLDER
    from opslot.trainer.exports import exported_step

    changes = trainer.data.describe_changes()
    try:
        result = trainer.train()
    except CheckpointError as error:
        # One that cannot be written: before training, a CheckpointError is about the user's input.
        raise TrainingError(error.problem, hint=error.hint) from error
    if (now := trainer.data.describe_changes()) != changes:
        trainer.print(f"data read so far{now}")
    if result.completed:
        trainer.print(f"done: {_steps(result.step)}; model, checkpoints and metrics are in {trainer.output_dir}")
        # The other ranks get here while rank 0 still writes it.
        if trainer.state.rank == 0 and (command := _load_command(trainer.output_dir / HF_FOLDER, trainer.model.config)):
            trainer.print(f"load it with: {command}")
            lora = trainer.config.lora
            if lora.r is not None and not lora.merge and trainer.config.task != "classification":
                options = " --trust-remote-code" if getattr(trainer.model.config, "auto_map", None) else ""
                trainer.print(f"merge it with: opslot merge {trainer.output_dir / HF_FOLDER} DESTINATION{options}")
        best = trainer.output_dir / BEST_FOLDER
        if trainer.best.step is not None and best.is_dir():
            # After a resumed run lost the model of the best evaluation, that of another one is there.
            step = exported_step(trainer.output_dir, BEST_FOLDER) or trainer.best.step
            trainer.print(f"the best model (step {step}) is in {best}")
    else:
        trainer.print(
            f"stopped after step {result.step}; checkpoint saved, continue with --train.checkpoint.resume_from latest"
        )
    return trainer, result


def _trainer_class(task: str) -> type[TextTrainer]:
    if task == "classification":
        from opslot.trainer.classification import ClassificationTrainer

        return ClassificationTrainer
    if task == "vlm":
        from opslot.trainer.vlm import VLMTrainer

        return VLMTrainer
    from opslot.trainer.text import TextTrainer

    return TextTrainer


def _load_command(folder: Path, config: Any) -> str | None:
    """The call of Transformers or PEFT that loads the exported model with `config`; None if there is none."""
    kinds = {
        "ForCausalLM": "CAUSAL_LM",
        "ForSequenceClassification": "SEQ_CLS",
        "ForTokenClassification": "TOKEN_CLS",
    }
    architecture = next(iter(config.architectures or ()), "")
    if (file := folder / "adapter_config.json").is_file():
        if architecture.endswith("ForConditionalGeneration"):
            # PEFT has no class that loads one; Transformers' load adapters too.
            return f'{_multimodal_class(config, architecture)}.from_pretrained("{folder}")'
        task = json.loads(file.read_text())["task_type"]
        kind = next(f"peft.AutoPeftModel{name}" for name, task_type in kinds.items() if task_type == task)
        if task != "CAUSAL_LM":
            # The labels are in no file of a folder with adapters.
            labels = config.id2label if len(config.id2label) <= _LABELS_SHOWN else None
            option = f"id2label={labels}" if labels else f"num_labels={config.num_labels}"
            return f'{kind}.from_pretrained("{folder}", {option})'
    elif (file := folder / "config.json").is_file():
        architecture = json.loads(file.read_text())["architectures"][0]
        if architecture.endswith("ForConditionalGeneration"):
            return f'{_multimodal_class(config, architecture)}.from_pretrained("{folder}")'
        kind = next((f"AutoModel{name}" for name in kinds if architecture.endswith(name)), architecture)
    else:
        return None
    options = ", trust_remote_code=True" if getattr(config, "auto_map", None) else ""
    return f'{kind}.from_pretrained("{folder}"{options})'


def _multimodal_class(config: Any, architecture: str) -> str:
    """The class of Transformers that loads a multimodal model: an Auto class where one has it."""
    from opslot.models._build import multimodal_auto_class

    auto, _ = multimodal_auto_class(config) or (architecture, architecture)
    return auto


@contextlib.contextmanager
def _reported_by_first_rank() -> Iterator[None]:
    """For errors that all ranks of a machine have in common: only its first rank reports them."""
    try:
        yield
    except OpslotError as error:
        if not is_first_local_rank() and launched_by_torchrun():
            # torchrun ends this rank when the first one exits; the other way round, it would end that one unheard.
            time.sleep(_LEAD_SECONDS)
        if launched_world_size() > 1 and not isinstance(error, ParallelError):
            from opslot.distributed.parallel_state import report_failed_start

            report_failed_start(error)
        if is_first_local_rank():
            raise
        raise OtherRankFailed("the first rank of this machine failed", hint="see its error") from error


@contextlib.contextmanager
def _logging_to(console: Console) -> Iterator[None]:
    """Send opslot's log lines to the trainer's console; other loggers are not changed."""

    class _ToConsole(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            console.print(self.format(record), highlight=False, markup=False, soft_wrap=True)

    logger = logging.getLogger("opslot")
    handler, level = _ToConsole(), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
