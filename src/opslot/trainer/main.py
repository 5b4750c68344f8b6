"""`opslot train`."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from opslot._base.errors import CheckpointError, OpslotError, ParallelError, TrainingError
from opslot._base.launcher import exit_with_launcher, launched_world_size
from opslot.trainer.parse import USAGE, build_parser, load_config
from opslot.trainer.threads import wait_without_spinning

if TYPE_CHECKING:
    from rich.console import Console

    from opslot.trainer.base import TrainResult
    from opslot.trainer.config import RunConfig
    from opslot.trainer.text import TextTrainer


def cli_train(argv: Sequence[str]) -> int:
    """Run `opslot train` with the arguments after that.

    Returns:
        0: done, or stopped by a signal with a checkpoint; 1: the run failed on the way; 2: wrong use or bad input.
    """
    arguments = [argument for argument in argv if argument != "--traceback"]
    if not arguments or "-h" in arguments or "--help" in arguments:
        build_parser().print_help(sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    if arguments[0].startswith("-"):
        print(f"opslot: error: the first argument is the YAML file\n  usage: {USAGE}", file=sys.stderr)
        return 2
    exit_with_launcher()
    wait_without_spinning()
    from opslot.distributed import OtherRankFailed

    try:
        # While it is not known which rank this is, every process speaks.
        launched_world_size()
        with _told_by_first_rank():
            config = load_config(arguments)
        run(config)
    except OtherRankFailed:
        return 1
    except OpslotError as error:
        if len(arguments) < len(argv):
            traceback.print_exc()
        print(f"opslot: error: {error}", file=sys.stderr)
        return 1 if isinstance(error, TrainingError | CheckpointError | ParallelError) else 2
    except KeyboardInterrupt:
        print("opslot: interrupted; the last checkpoint is intact", file=sys.stderr)
        return 1
    return 0


def run(config: RunConfig, console: Console | None = None) -> tuple[TextTrainer, TrainResult]:
    """Train as `config` says, and tell the user what is done and where everything is.

    Under torchrun every process calls it, the first one speaks, and all end when one fails.
    """
    from opslot.distributed import destroy_parallel_state, fail_together
    from opslot.trainer.base import start_processes
    from opslot.trainer.display import make_console

    console = console or make_console()
    with _logging_to(console), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        if launched_world_size() > 1:
            # Before anything that only one of them may find wrong.
            with _told_by_first_rank():
                start_processes(config)
        with fail_together():
            done = _run(config, console)
        destroy_parallel_state()
        return done


def _run(config: RunConfig, console: Console) -> tuple[TextTrainer, TrainResult]:
    from opslot.slots import explain
    from opslot.trainer.display import kernel_table
    from opslot.trainer.text import TextTrainer

    trainer = TextTrainer(config, console=console)
    kernels = explain(trainer.model)
    if len(kernels):
        trainer.console.print(kernel_table(kernels))
    processes = f" x {trainer.state.world_size} ({trainer.state})" if trainer.state.world_size > 1 else ""
    size = "at most " if config.data.max_tokens_per_batch else ""
    if trainer.max_steps is None:
        steps = f"{config.train.num_epochs:g} epochs in steps"
    else:
        steps = f"{max(0, trainer.max_steps - trainer.step):,} steps"
    trainer.say(
        f"{trainer.title} on {trainer.device}{processes}; {trainer.describe_data()}; {steps} of "
        f"{size}{config.train.global_batch_size * config.data.max_seq_len:,} tokens"
    )
    result = trainer.train()
    if result.completed:
        trainer.say(f"done; everything is in {trainer.output_dir} (the model: {trainer.output_dir / 'hf'})")
    else:
        trainer.say(f"stopped after step {result.step} and saved; go on with --train.resume_from latest")
    return trainer, result


@contextlib.contextmanager
def _told_by_first_rank() -> Iterator[None]:
    """For what goes wrong on all ranks of a machine if on one: an error inside is OtherRankFailed's on all but its
    first."""
    from opslot.distributed import OtherRankFailed

    try:
        yield
    except OpslotError as error:
        if (os.environ.get("LOCAL_RANK") or os.environ.get("RANK") or "0") == "0":
            raise
        raise OtherRankFailed("the machine's first rank failed") from error


@contextlib.contextmanager
def _logging_to(console: Console) -> Iterator[None]:
    """opslot's log lines go where the trainer's messages go; nobody else's logging changes."""

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
