"""What the demos share: the command, the output folder, and the training run."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opslot._base.errors import ConfigError, OpslotError
from opslot.trainer.main import wait_without_spinning

if TYPE_CHECKING:
    from rich.console import Console

    from opslot.trainer.text import TextTrainer


def run_demo(
    name: str,
    description: str,
    config: str,
    output: str,
    demo: Callable[[argparse.Namespace, Console], None],
    argv: Sequence[str] | None,
    steps: str = "those of the configuration",
    **options: Any,
) -> int:
    """Run the command `python -m demos.<name>`; returns its exit code.

    Args:
        config: file in configs/ without its ending.
        output: folder in outputs/.
        demo: called with the options and an output folder that does not exist.
        steps: the default of --steps, as its help shows it.
        options: further options, with the arguments of `add_argument`.
    """
    wait_without_spinning()
    started = time.monotonic()
    parser = argparse.ArgumentParser(f"python -m demos.{name}", description=description)
    paths = {"output": Path("outputs", output), "config": Path("configs", f"{config}.yaml")}
    for option, path in paths.items():
        parser.add_argument(f"--{option}", type=Path, default=path, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=None, help=f"optimizer steps; default {steps}")
    for option, settings in options.items():
        parser.add_argument(f"--{option}", **settings)
    given = parser.parse_args(argv)
    # After the help, since it imports torch.
    from opslot.trainer.display import make_console

    console = make_console()
    try:
        if not given.config.is_file():
            raise ConfigError(f"no such file: {given.config}", hint="run this in opslot's repository, or give --config")
        clear_output(given.output)
        demo(given, console)
    except OpslotError as error:
        print(f"demo: error: {error}", file=sys.stderr)
        return 2
    console.print(f"\ntotal: {time.monotonic() - started:.0f} s", highlight=False)
    return 0


def train_demo(options: argparse.Namespace, console: Console) -> TextTrainer | None:
    """Run `opslot train` on the inputs of a demo; returns the trainer, or None where the run was stopped."""
    from opslot.trainer.main import run
    from opslot.trainer.parse import load_config

    steps = f" --train.max_steps {options.steps}" if options.steps else ""
    console.rule(f"[bold]2. opslot train {options.config}{steps}")
    trainer, result = run(load_config(arguments_of(options)), console)
    return trainer if result.completed else None


def arguments_of(options: argparse.Namespace) -> list[str]:
    """Arguments of `opslot train` for a demo."""
    steps = [f"--train.max_steps={options.steps}"] if options.steps else []
    return [str(options.config), *path_arguments(options.output), *steps]


def path_arguments(output: Path) -> list[str]:
    """Arguments of `opslot train` for the inputs and outputs of a demo."""
    return [
        f"--model.config_path={output / 'model'}",
        f"--data.train_path={output / 'data' / 'train.jsonl'}",
        f"--data.eval_path={output / 'data' / 'eval.jsonl'}",
        f"--data.cache_dir={output / 'cache'}",
        f"--train.output_dir={output / 'run'}",
    ]


def clear_output(output: Path) -> None:
    """Remove the output of an earlier demo; any other folder is an error."""
    if not output.exists():
        return
    if any(output.iterdir()) and not (output / "data" / "train.jsonl").is_file():
        raise ConfigError(f"{output} is not the output of an earlier demo", hint="choose another folder with --output")
    shutil.rmtree(output)
