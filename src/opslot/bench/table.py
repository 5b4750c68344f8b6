"""A benchmark's result as tables of text."""

from __future__ import annotations

from collections.abc import Sequence

from opslot.bench.result import LossCurve, OpRow, Result, StepRow, by_comparison, eager_ms
from opslot.slots import format_table

OP_COLUMNS = ("time (ms)", "wall (ms)", "vs eager", "% of roofline", "peak MiB")
STEP_COLUMNS = ("tokens/s", "time (ms)", "vision (ms)", "audio (ms)", "peak GiB", "first loss", "last loss")


def result_text(result: Result) -> str:
    """Everything as text: tables, opslot's selected kernels, traces."""
    parts = [
        ops_table(result.ops) if result.ops else "",
        steps_table(result.steps) if result.steps else "",
        # The table of selected kernels; why the others were rejected is in the JSON and in `opslot explain`.
        *(s.kernels.partition("\n\n")[0] for s in result.steps if s.implementation == "opslot"),
        *(f"{s.implementation}\n{s.trace}" for s in result.steps if s.trace),
        curve_text(result.curve) if result.curve else "",
    ]
    return "\n\n".join(part for part in parts if part)


def ops_table(rows: Sequence[OpRow]) -> str:
    """One line per implementation; a time in parentheses is beside a failed check and does not count."""
    body = []
    for group in by_comparison(rows).values():
        eager = eager_ms(group)
        body += [(f"{r.op}/{r.variant}", r.case, r.kernel, *op_cells(r, eager), r.check) for r in group]
    return "\n".join(format_table(("op", "case", "kernel", *OP_COLUMNS, "check"), body))


def op_cells(row: OpRow, eager: float | None) -> tuple[str, ...]:
    """The cells of `OP_COLUMNS`."""
    return (
        time_cell(row),
        f"{row.wall_ms:.3f}" if row.valid and row.wall_ms else "-",
        f"{eager / row.ms:.2f}x" if row.valid and eager and row.ms else "-",
        f"{row.roofline_fraction:.0%}" if row.valid and row.roofline_fraction else "-",
        f"{row.peak_mib:,.0f}" if row.peak_mib is not None else "-",
    )


def time_cell(row: OpRow) -> str:
    """The time, in parentheses beside a failed check."""
    if row.ms is None:
        return "-"
    return f"{row.ms:.3f}" if row.valid else f"({row.ms:.3f})"


def steps_table(steps: Sequence[StepRow]) -> str:
    """One line per implementation of a training step."""
    body = [(s.title, s.implementation, *step_cells(s), step_check(s)) for s in steps]
    return "\n".join(format_table(("training step", "implementation", *STEP_COLUMNS, "check"), body))


def step_cells(step: StepRow) -> tuple[str, ...]:
    """The cells of `STEP_COLUMNS`."""
    formats = (
        (step.tokens_per_s, ",.0f"),
        (step.ms, ".1f"),
        (step.vision_ms, ".1f"),
        (step.audio_ms, ".1f"),
        (step.peak_gib, ".1f"),
        (step.first_loss, ".4f"),
        (step.last_loss, ".4f"),
    )
    return tuple("-" if value is None else format(value, form) for value, form in formats)


def step_check(step: StepRow) -> str:
    """The check, or why there is no time."""
    return f"failed: {step.error}" if step.error else step.check


def curve_text(curve: LossCurve) -> str:
    return (
        f"loss curve, {curve.steps} steps: opslot and Transformers differ by at most {curve.distance.largest:.4f} "
        f"nats per token, {curve.distance.mean:.4f} on average;\nTransformers from itself, with the samples of each "
        f"batch reversed: {curve.rounding.largest:.4f}, {curve.rounding.mean:.4f}"
    )


def significant(value: float) -> str:
    """A number with three significant digits."""
    return f"{value:#.3g}".rstrip(".") if value < 1000 else f"{value:,.0f}"
