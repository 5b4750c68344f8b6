"""Training steps of opslot and its peers, each contender in a process of its own, from the same weights and batches."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from opslot._base.errors import ConfigError
from opslot.bench import WARM_UP, compare_curves
from opslot.bench.baselines import BASELINES

# opslot's own contenders: what the options set, or upstream's code with an attention that fits into memory.
OWN = {"opslot": {}, "opslot eager": {"preset": "eager", "attn_implementation": "sdpa"}}

_LR, _CURVE_LR = 1e-5, 3e-4
# One rounding of bfloat16.
_SAME_LOSS = 2.0**-8


@dataclass(frozen=True)
class Task:
    """What every contender of one comparison gets.

    Attributes:
        name: what the model is called in tables.
        model: a Transformers config as plain data, with its model_type.
        ops: opslot's `ops_implementation`.
        peer_paths: by peer, a folder whose packages come first in that peer's process.
        trace: add a table of torch's profiler.
        limit: seconds that a contender may take.
    """

    name: str
    model: Mapping[str, Any]
    batch: int
    length: int
    steps: int
    dtype: str
    device: str
    ops: Mapping[str, str] = field(default_factory=dict)
    peer_paths: Mapping[str, str] = field(default_factory=dict)
    trace: bool = False
    limit: int = 900


def contenders(peers: Sequence[str]) -> list[str]:
    """opslot, opslot with everything eager, and the training models of `peers`."""
    return [*OWN, *(name for peer in peers for name, _ in BASELINES[peer].contenders)]


def compare_steps(task: Task, peers: Sequence[str], say: Callable[[str], None]) -> Iterator[list[dict[str, Any]]]:
    """One result per contender; a contender that fails has an "error" instead of a time, and the rest goes on.

    Yields:
        All results so far, after each contender.
    """
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in contenders(peers):
            say(f"training step: {name}")
            result = _run(task, name, Path(folder), lr=_LR)
            losses = result.pop("losses", None)
            if losses:
                result |= {"first_loss": losses[0], "last_loss": losses[-1]}
            rows.append({"model": task.name, "batch": [task.batch, task.length], "contender": name, **result})
            yield _judged(rows)


def _judged(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with a verdict: whether first and last loss are those of Transformers' own code."""
    done = [row for row in rows if "error" not in row]
    truth = next((row for name in ("hf", "opslot eager") for row in done if row["contender"] == name), None)
    for row in done:
        if truth is None:
            row["check"] = "unproven: Transformers' own code did not run"
            continue
        apart = max(abs(row[loss] / truth[loss] - 1.0) for loss in ("first_loss", "last_loss"))
        same = apart <= _SAME_LOSS
        row["check"] = "ok" if same else f"WRONG: a loss is {apart:.1%} from that of {truth['contender']}"
    return rows


def loss_curve(task: Task, tokens: Any, say: Callable[[str], None]) -> dict[str, Any]:
    """Train on the batches of a text under `auto` and as Transformers' own class, and say how far the losses part.

    Transformers is trained twice, the second time with the rows of every batch in reverse: the same mathematics summed
    in another order. Its distance from itself is what rounding alone makes of this model and length.

    Args:
        tokens: int array [steps, B, S].

    Raises:
        ConfigError: one of them failed.
    """
    import numpy

    runs = {"Transformers": ("hf", tokens), "opslot": ("opslot", tokens), "rounding": ("hf", tokens[:, ::-1])}
    losses = {}
    task = replace(task, steps=len(tokens) - WARM_UP, trace=False)
    with tempfile.TemporaryDirectory() as folder:
        for label, (contender, batches) in runs.items():
            say(f"loss curve: {label}")
            text = Path(folder) / f"{label}.npy"
            numpy.save(text, batches)
            result = _run(task, contender, Path(folder), lr=_CURVE_LR, text=str(text))
            if "error" in result:
                raise ConfigError(f"the loss curve of {label} failed: {result['error']}")
            losses[label] = result["losses"]
    return {
        "steps": len(tokens),
        "batch": [task.batch, task.length],
        "learning_rate": _CURVE_LR,
        "losses": losses,
        "apart": compare_curves(losses["Transformers"], losses["opslot"]),
        "rounding": compare_curves(losses["Transformers"], losses["rounding"]),
    }


def _run(task: Task, contender: str, folder: Path, *, lr: float, text: str = "") -> dict[str, Any]:
    place = folder / "task.json"
    answer = place.with_suffix(".result")
    answer.unlink(missing_ok=True)
    given = {k: v for k, v in vars(task).items() if k != "peer_paths"}
    place.write_text(json.dumps({**given, "contender": contender, "lr": lr, "text": text}))
    command = [sys.executable, "-m", "opslot.bench.step_process", str(place)]
    path = next((task.peer_paths[p] for p in _peers_of(contender) if p in task.peer_paths), None)
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=peer_environment(path), timeout=task.limit)
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {task.limit} s"}
    if not answer.exists():
        return {"error": _reason(done.stderr) or _ended(done.returncode), "log": done.stderr[-3000:]}
    return json.loads(answer.read_text())


def _ended(code: int) -> str:
    # Nothing was printed: on Linux it is mostly the kernel's, for want of memory.
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _peers_of(contender: str) -> Iterator[str]:
    return (peer.name for peer in BASELINES.values() if contender in dict(peer.contenders))


def peer_environment(path: str | None) -> dict[str, str]:
    """This process's environment, with the packages in `path` before all others."""
    environment = dict(os.environ)
    if path:
        environment["PYTHONPATH"] = os.pathsep.join(p for p in (path, environment.get("PYTHONPATH")) if p)
    return environment


def _reason(text: str) -> str:
    """The exception at the end of a traceback: its line and what follows it."""
    lines = text.strip().splitlines()
    named = [i for i, line in enumerate(lines) if re.match(r"[\w.]+(Error|Exception|Interrupt|Exit)\b", line)]
    return " ".join(line.strip() for line in lines[named[-1] if named else -1 :])[:500]
