"""A benchmark's result as tables of text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from opslot.bench import BenchRow
from opslot.slots import format_table


def sites(rows: Sequence[BenchRow]) -> dict[tuple[str, str, str], list[BenchRow]]:
    """Rows by what they have in common, the proven ones first, fastest on top; then those that do not count."""
    groups: dict[tuple[str, str, str], list[BenchRow]] = {}
    for row in rows:
        groups.setdefault(row.site, []).append(row)
    return {site: sorted(group, key=lambda r: (not r.counts, r.ms or float("inf"))) for site, group in groups.items()}


def eager_of(group: Sequence[BenchRow]) -> float | None:
    """Milliseconds of eager among the implementations of one comparison."""
    return next((r.ms for r in group if r.kernel == "eager" and r.counts), None)


def bar_limit(values: Sequence[float]) -> float:
    """Where a chart's bars end: at the longest, unless it is so far ahead that the others could not be told apart."""
    ranked = sorted(values, reverse=True)
    if len(ranked) < 3 or ranked[0] <= 3 * ranked[1]:
        return ranked[0] if ranked else 1.0
    return 1.25 * ranked[1]


def ops_table(rows: Sequence[BenchRow]) -> str:
    """One line per implementation; a time in parentheses stands beside a check that failed and does not count."""
    header = ("op", "case", "kernel", "ms", "alone", "x eager", "of floor", "peak MiB", "check")
    body = []
    for group in sites(rows).values():
        eager = eager_of(group)
        for r in group:
            body.append(
                (
                    f"{r.op}/{r.variant}",
                    r.case,
                    r.kernel,
                    shown_ms(r),
                    f"{r.alone_ms:.3f}" if r.counts and r.alone_ms else "-",
                    f"{eager / r.ms:.2f}" if r.counts and eager and r.ms else "-",
                    f"{r.share:.0%}" if r.counts and r.share else "-",
                    f"{r.peak_mib:.0f}" if r.peak_mib is not None else "-",
                    r.verdict,
                )
            )
    return "\n".join(format_table(header, body))


def shown_ms(row: BenchRow) -> str:
    if row.ms is None:
        return "-"
    return f"{row.ms:.3f}" if row.counts else f"({row.ms:.3f})"


def models(steps: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Training steps by model."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for step in steps:
        groups.setdefault(step["model"], []).append(step)
    return groups


def steps_table(steps: Sequence[dict[str, Any]]) -> str:
    header = ("training step", "contender", "ms", "tokens/s", "peak GiB", "first loss", "last loss", "check")
    body = []
    for s in steps:
        if "error" in s:
            body.append((s["model"], s["contender"], "-", "-", "-", "-", "-", f"failed: {s['error']}"))
            continue
        peak = f"{s['peak_gib']:.1f}" if s["peak_gib"] is not None else "-"
        figures = f"{s['ms']:.1f}", f"{s['tokens_per_s']:,.0f}", peak
        body.append(
            (s["model"], s["contender"], *figures, f"{s['first_loss']:.4f}", f"{s['last_loss']:.4f}", s["check"])
        )
    return "\n".join(format_table(header, body))


def curve_line(curve: dict[str, Any]) -> str:
    apart, rounding = curve["apart"], curve["rounding"]
    return (
        f"loss curve, {curve['steps']} steps: opslot and Transformers are at most {apart['largest']:.4f} apart, "
        f"{apart['mean']:.4f} on average;\nTransformers and itself, with the rows of each batch in reverse: "
        f"{rounding['largest']:.4f}, {rounding['mean']:.4f}"
    )
