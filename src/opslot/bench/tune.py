"""Turn measured rows into timings that `auto` reads."""

from __future__ import annotations

from collections.abc import Iterable

from opslot.bench.result import OpRow, by_comparison
from opslot.slots import KERNEL_REGISTRY, Timing


def timings_of(rows: Iterable[OpRow]) -> list[Timing]:
    """One timing per case that a module can have: of eager and registered kernels, times only beside passed checks."""
    found = []
    for group in by_comparison([row for row in rows if _selectable(row)]).values():
        first = group[0]
        assert first.shape is not None
        assert first.tokens is not None
        ms = {r.kernel: round(r.ms, 6) for r in group if r.valid and r.ms is not None}
        failed = {r.kernel: r.check for r in group if not r.valid}
        found.append(Timing(first.op, first.variant, first.dtype, first.shape, first.tokens, ms, failed))
    return found


def timings_text(timings: Iterable[Timing]) -> str:
    """What `auto` will choose from, one paragraph per op and shape."""
    lines = []
    for t in timings:
        shape = ", ".join(f"{k} {v}" for k, v in t.shape.items())
        times = ", ".join(f"{name} {ms:.3g} ms" for name, ms in sorted(t.ms.items(), key=lambda item: item[1]))
        lines.append(f"  {t.op}/{t.variant} ({shape}): {times or 'no valid time'}")
        lines += [f"    left out: {name}: {why}" for name, why in t.failed.items()]
    return "\n".join(lines)


def _selectable(row: OpRow) -> bool:
    if row.shape is None or row.tokens is None:
        return False
    return row.kernel == "eager" or any(s.name == row.kernel for s in KERNEL_REGISTRY.specs(row.op, row.variant))
