"""What a benchmark reports: one row an implementation and case, and the machine that it ran on."""

from __future__ import annotations

import math
import platform
import subprocess
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from opslot._base.device import facts_of, package_version

_PACKAGES = (
    "torch",
    "transformers",
    "triton",
    "liger-kernel",
    "quack-kernels",
    "flash-attn-4",
    "fla-core",
    "cut-cross-entropy",
    "veomni",
)


@dataclass(frozen=True)
class BenchRow:
    """One implementation on one case, forward plus backward.

    Attributes:
        kernel: "eager", "torch.compile", a registered kernel's name, or "<peer>: <what>".
        shape, tokens: the case's static sizes and tokens, where the op declares them.
        ms: median milliseconds on the device; None when it failed.
        alone_ms: the same with the host's part, in a loop that does nothing else.
        floor_ms: the least this machine could need; None where the op declares no cost.
        peak_mib: memory allocated above the inputs at the peak; None off CUDA.
        verdict: "ok ..." when the implementation was proven, else what is wrong: a number beside anything else does
            not count.
    """

    op: str
    variant: str
    case: str
    kernel: str
    dtype: str
    ms: float | None = None
    alone_ms: float | None = None
    floor_ms: float | None = None
    peak_mib: float | None = None
    verdict: str = ""
    shape: dict[str, int] | None = None
    tokens: int | None = None

    @property
    def counts(self) -> bool:
        """Whether there is a time, beside a check that passed."""
        return self.ms is not None and self.verdict.startswith("ok")

    @property
    def share(self) -> float | None:
        """Floor over time: 1.0 is as fast as the machine can be."""
        return self.floor_ms / self.ms if self.ms and self.floor_ms else None

    @property
    def site(self) -> tuple[str, str, str]:
        """What the implementations of one comparison have in common."""
        return self.op, self.variant, self.case


def as_dict(row: BenchRow) -> dict[str, Any]:
    """A row as plain data, with its share of the floor."""
    return {**asdict(row), "share_of_floor": row.share}


def read_row(data: Mapping[str, Any]) -> BenchRow:
    """The row that `as_dict` made `data` of; TypeError or ValueError for anything else."""
    row = BenchRow(**{f.name: data[f.name] for f in fields(BenchRow) if f.name in data})
    for value in (row.ms, row.alone_ms, row.floor_ms, row.peak_mib):
        if value is not None and not math.isfinite(value):
            raise ValueError(f"{row.kernel} of {row.op} with {value}")
    return row


def environment(device: torch.device | str) -> dict[str, Any]:
    """Machine, versions and commit that a committed result carries."""
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return {
        "device": str(facts_of(device)),
        "cpu": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": {p: v for p in _PACKAGES if (v := package_version(p))},
        "commit": found.stdout.strip(),
        "date": time.strftime("%Y-%m-%d"),
    }
