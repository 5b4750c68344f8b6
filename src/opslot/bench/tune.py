"""Turn measured rows into timings that `auto` reads."""

from __future__ import annotations

from collections.abc import Iterable

from opslot.bench.rows import BenchRow
from opslot.slots import KERNEL_REGISTRY, Timing


def timings_of(rows: Iterable[BenchRow]) -> list[Timing]:
    """One timing per case that a site can have; only eager and registered kernels, and times only of the proven."""
    groups: dict[tuple[str, str, str], list[BenchRow]] = {}
    for row in rows:
        if row.shape is not None and row.tokens is not None and _selectable(row):
            groups.setdefault(row.site, []).append(row)
    found = []
    for group in groups.values():
        first = group[0]
        assert first.shape is not None
        assert first.tokens is not None
        ms = {r.kernel: round(r.ms, 6) for r in group if r.counts and r.ms is not None}
        failed = {r.kernel: r.verdict for r in group if not r.counts}
        found.append(Timing(first.op, first.variant, first.dtype, first.shape, first.tokens, ms, failed))
    return found


def _selectable(row: BenchRow) -> bool:
    return row.kernel == "eager" or any(s.name == row.kernel for s in KERNEL_REGISTRY.specs(row.op, row.variant))
