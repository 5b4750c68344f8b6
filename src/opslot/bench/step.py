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
from dataclasses import replace
from pathlib import Path
from typing import Any

from opslot._base.device import best_device
from opslot._base.errors import ConfigError
from opslot.bench.baselines import BASELINES, baseline_of
from opslot.bench.options import BenchOptions
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
    "opslot + layers as CUDA graphs": {},
    "opslot eager": None,
}
_COMPILED = ("torch.compile", "compiled layers", "CUDA graphs")
_LR, _CURVE_LR = 1e-5, 3e-4
# The spacing of bfloat16 numbers, relative to their size.
_LOSS_TOLERANCE = 2.0**-8


def known_implementations(baselines: Sequence[str]) -> list[str]:
    """opslot's own and the models of `baselines`."""
    return [*OWN_IMPLEMENTATIONS, *(name for baseline in baselines for name in BASELINES[baseline].models)]


def implementations(baselines: Sequence[str], compiled: bool = False, on_gpu: bool = True) -> list[str]:
    """Those that are timed where none is named: without FP8, and with torch.compile only if `compiled`.

    Without Transformers among them, opslot with everything eager is what losses are compared with.
    """
    left_out = {"opslot + FP8", "opslot eager" if "hf" in baselines else ""}
    if not on_gpu:
        left_out.add("opslot + layers as CUDA graphs")
    names = known_implementations(baselines)
    return [name for name in names if name not in left_out and (compiled or not name.endswith(_COMPILED))]


def compare_steps(
    models: Mapping[str, Mapping[str, Any]], options: BenchOptions, report: Callable[[str], None]
) -> Iterator[list[StepRow]]:
    """Time the training steps of every implementation; one that fails has an error instead of a time.

    Args:
        models: Transformers configs as plain data, by what tables call the model. An implementation trains them one
            after another in one process, and the rest in a new one after a failure.
        options: with batch, length, dtype and device.

    Yields:
        All rows so far, ordered by model, after each of them.
    """
    rows: dict[str, list[StepRow]] = {name: [] for name in models}
    on_gpu = (options.device or best_device().type).startswith("cuda")
    for implementation in options.implementations or implementations(options.baselines, options.compile, on_gpu):
        with tempfile.TemporaryDirectory() as folder:
            for name, found in _run(models, implementation, options, Path(folder), lr=_LR, report=report):
                losses = found.pop("losses", None)
                if losses:
                    found |= {"first_loss": losses[0], "last_loss": losses[-1]}
                found |= {of: getattr(options, of) for of in ("batch", "length", "image_size", "audio_seconds")}
                rows[name].append(StepRow(name, implementation, **found))
                yield [row for of_model in rows.values() for row in check_losses(of_model)]


def check_losses(rows: Sequence[StepRow]) -> list[StepRow]:
    """The rows with their check: whether first and last loss match those of Transformers' own code."""
    done = [row for row in rows if not row.error]
    names = ("Transformers", "Transformers + FlashAttention 4", "opslot eager")
    reference = next((r for name in names for r in done if r.implementation == name), None)
    if reference is None:
        missing = "unchecked: Transformers' own code did not run"
        return [row if row.error else replace(row, check=missing) for row in rows]
    return [row if row.error else replace(row, check=loss_check(row, reference)) for row in rows]


def loss_check(row: StepRow, reference: StepRow) -> str:
    """ "ok" where first and last loss match those of another implementation, else how far they are from them."""
    pairs = [(row.first_loss, reference.first_loss), (row.last_loss, reference.last_loss)]
    difference = max(abs(loss / expected - 1.0) for loss, expected in pairs if loss is not None and expected)
    if difference <= _LOSS_TOLERANCE:
        return "ok"
    return f"WRONG: a loss differs by {difference:.1%} from {reference.implementation}"


def loss_curve(
    models: Mapping[str, Mapping[str, Any]], tokens: Any, options: BenchOptions, report: Callable[[str], None]
) -> LossCurve:
    """Train on the batches of a text with `auto` and with Transformers' own class, and compare the losses.

    Transformers is trained twice, the second time with the samples of every batch reversed: the same mathematics,
    summed in another order. Its distance from itself is what rounding alone does with this model and length.

    Args:
        models: one, as `compare_steps` takes it.
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
    options = replace(options, steps=len(tokens) - WARM_UP, trace=False)
    with tempfile.TemporaryDirectory() as folder:
        for label, (implementation, batches) in orders.items():
            report(f"loss curve: {label}")
            text = Path(folder) / f"{label}.npy"
            numpy.save(text, batches)
            runs = _run(models, implementation, options, Path(folder), lr=_CURVE_LR, report=report, text=str(text))
            found = next(found for _, found in runs)
            if "error" in found:
                raise ConfigError(
                    f"the loss curve of {label} failed",
                    found=found["error"],
                    hint="leave out --curve, or if memory ran out, lower --batch, --length or --layers",
                )
            losses[label] = found["losses"]
    steps, batch, length = tokens.shape
    return LossCurve(
        steps,
        batch,
        length,
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
    models: Mapping[str, Mapping[str, Any]],
    implementation: str,
    options: BenchOptions,
    folder: Path,
    *,
    lr: float,
    report: Callable[[str], None],
    text: str = "",
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each model's name with the fields of a `StepRow` that one implementation measured, and its losses; or its error.

    The process that measures reads the fields of `options` from a file.
    """
    environment = process_environment(options.baseline_paths.get(baseline_of(implementation)))
    requests = [folder / f"{i}.json" for i in range(len(models))]
    for model, request in zip(models.values(), requests, strict=True):
        given = {"model": model, "implementation": implementation, "lr": lr, "text": text}
        request.write_text(json.dumps(vars(options) | given))
    process, errors = None, folder / "errors"
    for i, (name, request) in enumerate(zip(models, requests, strict=True)):
        report(f"training step: {implementation}, {name}")
        if process is None or process.poll() is not None:
            command = [sys.executable, "-m", "opslot.bench.step_process", *map(str, requests[i:])]
            with errors.open("w") as file:
                process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=file, env=environment)
        yield name, _result_of(process, request.with_suffix(".result"), errors, options.timeout)
    assert process is not None
    process.wait()


def _result_of(process: subprocess.Popen[bytes], file: Path, errors: Path, timeout: float) -> dict[str, Any]:
    """The content of `file` once the process has written it, or why it has not: it ends at the first failure."""
    deadline = time.monotonic() + timeout
    while not file.exists() and process.poll() is None:
        if time.monotonic() > deadline:
            process.kill()
            process.wait()
            return {"error": f"not done after {timeout} s"}
        time.sleep(0.05)
    if file.exists():
        return json.loads(file.read_text())
    # A killed process, usually for lack of memory, writes no traceback, only warnings.
    code = process.returncode
    return {"error": (code > 0 and reason(errors.read_text())) or _exit_status(code)}


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
