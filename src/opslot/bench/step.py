"""Training steps of a whole model, one process per implementation, from the same weights and batches."""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from opslot._base.errors import ConfigError
from opslot.bench.baselines import BASELINES, baseline_of
from opslot.bench.result import Distance, LossCurve, StepRow

WARM_UP = 3
EAGER = {"preset": "eager", "attn_implementation": "sdpa"}
# opslot's own implementations, with what each adds to the options' `ops_implementation`; None for eager code instead.
OWN_IMPLEMENTATIONS: dict[str, dict[str, str] | None] = {
    "opslot": {},
    "opslot + FP8": {"linear_implementation": "fp8"},
    "opslot + torch.compile": {},
    "opslot + compiled layers": {},
    "opslot + CUDA graphs": {},
    "opslot eager": None,
}
_COMPILED = ("torch.compile", "compiled layers", "CUDA graphs")
_LR, _CURVE_LR = 1e-5, 3e-4
# The spacing of bfloat16 numbers, relative to their size.
_LOSS_TOLERANCE = 2.0**-8


@dataclass(frozen=True)
class StepTask:
    """What every implementation of one comparison trains.

    Attributes:
        name: what the model is called in tables.
        model: a Transformers config as plain data, with its model_type.
        length: tokens per sample; with images or audio, those of its text.
        image_size: side in pixels of the image that each sample begins with; 0 for none.
        audio_seconds: of the audio that follows the image; 0 for none.
        ops: opslot's `ops_implementation`.
        compiled: also time opslot with `model.compile()`, also in mode "reduce-overhead" (CUDA graphs), and with
            `opslot.parallelize(model, compile=True)`.
        baseline_paths: by baseline, a folder whose packages come first in that baseline's process.
        trace: add a table of torch.profiler.
        timeout: seconds that one implementation may take.
    """

    name: str
    model: Mapping[str, Any]
    batch: int
    length: int
    steps: int
    dtype: str
    device: str
    ops: Mapping[str, str] = field(default_factory=dict)
    compiled: bool = False
    baseline_paths: Mapping[str, str] = field(default_factory=dict)
    trace: bool = False
    timeout: int = 900
    image_size: int = 0
    audio_seconds: int = 0


def known_implementations(baselines: Sequence[str]) -> list[str]:
    """opslot's own and the models of `baselines`."""
    return [*OWN_IMPLEMENTATIONS, *(name for baseline in baselines for name, _ in BASELINES[baseline].models)]


def implementations(baselines: Sequence[str], compiled: bool = False) -> list[str]:
    """Those that are timed where none is named: without FP8, and with torch.compile only if `compiled`.

    Without Transformers among them, opslot with everything eager is what losses are compared with.
    """
    left_out = {"opslot + FP8", "opslot eager" if "hf" in baselines else ""}
    names = known_implementations(baselines)
    return [name for name in names if name not in left_out and (compiled or not name.endswith(_COMPILED))]


def compare_steps(
    tasks: Sequence[StepTask],
    baselines: Sequence[str],
    report: Callable[[str], None],
    only: Sequence[str] = (),
) -> Iterator[list[StepRow]]:
    """Time the training steps of every implementation; one that fails has an error instead of a time.

    Args:
        tasks: models to train. An implementation trains them one after another in one process, and the rest in a new
            one after a failure.
        only: implementations to time; empty for all.

    Yields:
        All rows so far, ordered by model, after each of them.
    """
    rows: dict[str, list[StepRow]] = {task.name: [] for task in tasks}
    compiled = any(task.compiled for task in tasks)
    for name in only or implementations(baselines, compiled):
        with tempfile.TemporaryDirectory() as folder:
            for task, found in _run(tasks, name, Path(folder), lr=_LR, report=report):
                losses = found.pop("losses", None)
                if losses:
                    found |= {"first_loss": losses[0], "last_loss": losses[-1]}
                found |= {"image_size": task.image_size, "audio_seconds": task.audio_seconds}
                rows[task.name].append(StepRow(task.name, name, task.batch, task.length, **found))
                yield [row for of_model in rows.values() for row in check_losses(of_model)]


def check_losses(rows: Sequence[StepRow]) -> list[StepRow]:
    """The rows with their check: whether first and last loss match those of Transformers' own code."""
    done = [row for row in rows if not row.error]
    names = ("Transformers", "Transformers + FlashAttention 4", "opslot eager")
    reference = next((r for name in names for r in done if r.implementation == name), None)
    return [row if row.error else replace(row, check=_loss_check(row, reference)) for row in rows]


def _loss_check(row: StepRow, reference: StepRow | None) -> str:
    if reference is None:
        return "unchecked: Transformers' own code did not run"
    pairs = [(row.first_loss, reference.first_loss), (row.last_loss, reference.last_loss)]
    difference = max(abs(loss / expected - 1.0) for loss, expected in pairs if loss is not None and expected)
    if difference <= _LOSS_TOLERANCE:
        return "ok"
    return f"WRONG: a loss differs by {difference:.1%} from {reference.implementation}"


def loss_curve(task: StepTask, tokens: Any, report: Callable[[str], None]) -> LossCurve:
    """Train on the batches of a text with `auto` and with Transformers' own class, and compare the losses.

    Transformers is trained twice, the second time with the samples of every batch reversed: the same mathematics,
    summed in another order. Its distance from itself is what rounding alone does with this model and length.

    Args:
        tokens: int array [steps, B, S].

    Raises:
        ConfigError: one of them failed.
    """
    import numpy

    orders = {
        "Transformers": ("Transformers", tokens),
        "opslot": ("opslot", tokens),
        "rounding": ("Transformers", tokens[:, ::-1]),
    }
    losses = {}
    task = replace(task, steps=len(tokens) - WARM_UP, trace=False)
    with tempfile.TemporaryDirectory() as folder:
        for label, (implementation, batches) in orders.items():
            report(f"loss curve: {label}")
            text = Path(folder) / f"{label}.npy"
            numpy.save(text, batches)
            runs = _run([task], implementation, Path(folder), lr=_CURVE_LR, report=report, text=str(text))
            found = next(found for _, found in runs)
            if "error" in found:
                raise ConfigError(f"the loss curve of {label} failed", found=found["error"])
            losses[label] = found["losses"]
    return LossCurve(
        len(tokens),
        task.batch,
        task.length,
        _CURVE_LR,
        losses,
        compare_curves(losses["Transformers"], losses["opslot"]),
        compare_curves(losses["Transformers"], losses["rounding"]),
    )


def compare_curves(reference: Sequence[float], other: Sequence[float]) -> Distance:
    """The differences between two loss curves over the same batches."""
    differences = [abs(a - b) for a, b in zip(reference, other, strict=True)]
    return Distance(max(differences), statistics.fmean(differences), differences[-1])


def _run(
    tasks: Sequence[StepTask],
    implementation: str,
    folder: Path,
    *,
    lr: float,
    report: Callable[[str], None],
    text: str = "",
) -> Iterator[tuple[StepTask, dict[str, Any]]]:
    """Each task with the fields of a `StepRow` that one implementation measured, and its losses; or its error."""
    environment = process_environment(tasks[0].baseline_paths.get(baseline_of(implementation)))
    requests = [folder / f"{i}.json" for i in range(len(tasks))]
    for task, request in zip(tasks, requests, strict=True):
        given = {k: v for k, v in vars(task).items() if k not in ("baseline_paths", "compiled")}
        request.write_text(json.dumps({**given, "implementation": implementation, "lr": lr, "text": text}))
    process: _Process | None = None
    for i, (task, request) in enumerate(zip(tasks, requests, strict=True)):
        report(f"training step: {implementation}, {task.name}")
        if process is None or process.poll() is not None:
            left = requests[i:]
            process = _Process(
                [sys.executable, "-m", "opslot.bench.step_process", *map(str, left)], environment, folder / "errors"
            )
        yield task, process.result(request.with_suffix(".result"), task.timeout)
    assert process is not None
    process.wait()


class _Process:
    """A process that writes its results to files, in order, and ends at the first failure."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], errors: Path) -> None:
        self._errors = errors
        with errors.open("w") as file:
            self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=file, env=environment)

    def poll(self) -> int | None:
        return self._process.poll()

    def wait(self) -> None:
        self._process.wait()

    def result(self, file: Path, timeout: float) -> dict[str, Any]:
        """The content of `file` once it is written, or why it is not."""
        deadline = time.monotonic() + timeout
        while not file.exists() and self.poll() is None:
            if time.monotonic() > deadline:
                self._process.kill()
                self._process.wait()
                return {"error": f"not done after {timeout} s"}
            time.sleep(0.05)
        if file.exists():
            return json.loads(file.read_text())
        code = self._process.returncode
        # A killed process, usually for lack of memory, writes no traceback, only warnings.
        return {"error": (code > 0 and reason(self._errors.read_text())) or _exit_status(code)}


def _exit_status(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def process_environment(path: str | None) -> dict[str, str]:
    """This process's environment, with the packages in `path` before all others."""
    environment = dict(os.environ)
    if path:
        environment["PYTHONPATH"] = os.pathsep.join(p for p in (path, environment.get("PYTHONPATH")) if p)
    return environment


def reason(text: str) -> str:
    """The exception at the end of a traceback: its line and what follows it, without warnings of torch's C++ code."""
    # torch.distributed writes "[rank0]: " before each line of a traceback, and "[rank0]:[W" before a warning.
    lines = [re.sub(r"^\[rank\d+\]: ", "", line) for line in text.strip().splitlines()]
    lines = [line for line in lines if not re.match(r"(\[rank\d+\]:)?\[W\d", line)]
    named = [i for i, line in enumerate(lines) if re.match(r"[\w.]+(Error|Exception|Interrupt|Exit)\b", line)]
    return " ".join(line.strip() for line in lines[named[-1] if named else -1 :])[:500]
