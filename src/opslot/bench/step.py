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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from opslot._base.errors import ConfigError
from opslot.bench.baselines import BASELINES
from opslot.bench.result import Distance, LossCurve, StepRow

WARM_UP = 3
_EAGER = {"preset": "eager", "attn_implementation": "sdpa"}
# opslot's own implementations: with the options' `ops_implementation` (None), or with another one.
OWN_IMPLEMENTATIONS: dict[str, dict[str, str] | None] = {
    "opslot": None,
    "opslot + torch.compile": None,
    "opslot eager": _EAGER,
}
_LR, _CURVE_LR = 1e-5, 3e-4
# The spacing of bfloat16 numbers, relative to their size.
_LOSS_TOLERANCE = 2.0**-8


@dataclass(frozen=True)
class StepTask:
    """What every implementation of one comparison trains.

    Attributes:
        name: what the model is called in tables.
        model: a Transformers config as plain data, with its model_type.
        ops: opslot's `ops_implementation`.
        compiled: also time opslot with `model.compile()`.
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


def implementations(baselines: Sequence[str], compiled: bool = False) -> list[str]:
    """opslot, with torch.compile where asked for, and the models of `baselines`.

    Without Transformers among them, opslot with everything eager is what losses are compared with.
    """
    left_out = {"opslot eager"} if "hf" in baselines else set()
    left_out |= set() if compiled else {"opslot + torch.compile"}
    own = [name for name in OWN_IMPLEMENTATIONS if name not in left_out]
    return [*own, *(name for baseline in baselines for name, _ in BASELINES[baseline].models)]


def compare_steps(task: StepTask, baselines: Sequence[str], report: Callable[[str], None]) -> Iterator[list[StepRow]]:
    """Time the training step of every implementation; one that fails has an error instead of a time.

    Yields:
        All rows so far, after each implementation.
    """
    rows: list[StepRow] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in implementations(baselines, task.compiled):
            report(f"training step: {name}")
            found = _run(task, name, Path(folder), lr=_LR)
            losses = found.pop("losses", None)
            if losses:
                found |= {"first_loss": losses[0], "last_loss": losses[-1]}
            rows.append(StepRow(task.name, name, task.batch, task.length, **found))
            yield check_losses(rows)


def check_losses(rows: Sequence[StepRow]) -> list[StepRow]:
    """The rows with their check: whether first and last loss match those of Transformers' own code."""
    done = [row for row in rows if not row.error]
    reference = next((r for name in ("Transformers", "opslot eager") for r in done if r.implementation == name), None)
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

    runs = {
        "Transformers": ("Transformers", tokens),
        "opslot": ("opslot", tokens),
        "rounding": ("Transformers", tokens[:, ::-1]),
    }
    losses = {}
    task = replace(task, steps=len(tokens) - WARM_UP, trace=False)
    with tempfile.TemporaryDirectory() as folder:
        for label, (implementation, batches) in runs.items():
            report(f"loss curve: {label}")
            text = Path(folder) / f"{label}.npy"
            numpy.save(text, batches)
            found = _run(task, implementation, Path(folder), lr=_CURVE_LR, text=str(text))
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


def _run(task: StepTask, implementation: str, folder: Path, *, lr: float, text: str = "") -> dict[str, Any]:
    """The fields of a `StepRow` that one implementation's process measured, and its losses; or its error."""
    request = folder / "task.json"
    answer = request.with_suffix(".result")
    answer.unlink(missing_ok=True)
    given = {k: v for k, v in vars(task).items() if k not in ("baseline_paths", "compiled")}
    request.write_text(json.dumps({**given, "implementation": implementation, "lr": lr, "text": text}))
    command = [sys.executable, "-m", "opslot.bench.step_process", str(request)]
    environment = process_environment(task.baseline_paths.get(_baseline_of(implementation)))
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=task.timeout)
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {task.timeout} s"}
    if not answer.exists():
        return {"error": reason(done.stderr) or _exit_status(done.returncode)}
    return json.loads(answer.read_text())


def _exit_status(code: int) -> str:
    # Without an error message: usually killed by the kernel because the machine ran out of memory.
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _baseline_of(implementation: str) -> str:
    return next((b.name for b in BASELINES.values() if implementation in dict(b.models)), "")


def process_environment(path: str | None) -> dict[str, str]:
    """This process's environment, with the packages in `path` before all others."""
    environment = dict(os.environ)
    if path:
        environment["PYTHONPATH"] = os.pathsep.join(p for p in (path, environment.get("PYTHONPATH")) if p)
    return environment


def reason(text: str) -> str:
    """The exception at the end of a traceback: its line and what follows it."""
    lines = text.strip().splitlines()
    named = [i for i, line in enumerate(lines) if re.match(r"[\w.]+(Error|Exception|Interrupt|Exit)\b", line)]
    return " ".join(line.strip() for line in lines[named[-1] if named else -1 :])[:500]
