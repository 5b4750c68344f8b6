"""`opslot bench`: who is fastest where, beside the floor and the check's verdict."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from opslot._base.device import best_device
from opslot._base.errors import ConfigError
from opslot.slots import format_table
from opslot.testing.bench import BenchRow, as_dict, bench, environment


def run(op: str | None, dtype: str, device: str | None, output: str | None, picture: str | None, as_json: bool) -> int:
    """Print the table and write what was asked for; exit code 1 when a kernel's check fails."""
    where = device or {"gpu": "cuda"}.get(best_device().type, best_device().type)
    number = getattr(torch, dtype, None)
    if not isinstance(number, torch.dtype):
        raise ConfigError(f"--dtype {dtype!r} is no dtype of torch; use bfloat16, float16 or float32")
    if output and not Path(output).parent.is_dir():
        raise ConfigError(f"--output {output!r}: the folder {Path(output).parent} does not exist; make it first")
    rows = list(bench(op, device=where, dtype=number))
    if not rows:
        raise ConfigError(f"op {op!r} has no cases worth timing; run `opslot kernels` for the ops that exist")
    result = {"environment": environment(where), "rows": [as_dict(row) for row in rows]}
    if output:
        Path(output).write_text(json.dumps(result, indent=1) + "\n")
    if picture:
        draw(rows, Path(picture), result["environment"])
    print(json.dumps(result, indent=1) if as_json else _table(rows))
    return 1 if any(row.verdict.startswith("WRONG") for row in rows) else 0


def _table(rows: list[BenchRow]) -> str:
    header = ("op", "case", "kernel", "ms", "x eager", "of floor", "peak MiB", "check")
    eager = {(r.op, r.variant, r.case): r.ms for r in rows if r.kernel == "eager"}
    body = []
    for r in rows:
        base = eager.get((r.op, r.variant, r.case))
        counts = r.ms is not None and not r.verdict.startswith("WRONG")
        body.append(
            (
                f"{r.op}/{r.variant}",
                r.case,
                r.kernel,
                f"{r.ms:.3f}" if counts and r.ms else "-",
                f"{base / r.ms:.2f}" if counts and base and r.ms else "-",
                f"{r.share:.0%}" if counts and r.share else "-",
                f"{r.peak_mib:.0f}" if r.peak_mib is not None else "-",
                r.verdict,
            )
        )
    return "\n".join(format_table(header, body))


def draw(rows: list[BenchRow], path: Path, environment: dict[str, Any]) -> None:
    """One panel a case: time of each implementation as a bar, the floor as a line; wrong kernels are left out."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    cases: dict[tuple[str, str, str], list[BenchRow]] = {}
    for row in rows:
        if row.ms is not None and not row.verdict.startswith("WRONG"):
            cases.setdefault((row.op, row.variant, row.case), []).append(row)
    columns = 3
    lines = -(-len(cases) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(15, 2.6 * lines), squeeze=False, layout="constrained")
    for axis in axes.flat[len(cases) :]:
        axis.axis("off")
    for axis, ((op, variant, case), group) in zip(axes.flat, cases.items(), strict=False):
        group = sorted(group, key=lambda r: r.ms or 0.0, reverse=True)
        best = group[-1].kernel
        colours = ["#1f6feb" if r.kernel == best else "#9aa4b2" for r in group]
        axis.barh([r.kernel for r in group], [r.ms or 0.0 for r in group], color=colours)
        for i, r in enumerate(group):
            axis.text(r.ms or 0.0, i, f" {r.ms:.3g}", va="center", fontsize=8)
        if group[0].floor_ms:
            axis.axvline(group[0].floor_ms, color="#d1242f", linewidth=1.2, linestyle="--")
        axis.set_title(f"{op}/{variant}: {case}", fontsize=9, loc="left")
        axis.set_xlim(0, 1.18 * max(r.ms or 0.0 for r in group))
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
    figure.suptitle(
        f"forward + backward, ms; dashed: the floor ({environment['device']}, {environment['date']})", fontsize=11
    )
    figure.savefig(path, dpi=130)
    plt.close(figure)
