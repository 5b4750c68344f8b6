"""The table that shows which kernel is in which slot, and why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from opslot.slots.binding import Binding, SkippedPart, SlotBinding


@dataclass(frozen=True)
class BindingRow:
    """One group of slots that share a class, a kernel and its reasons.

    Attributes:
        slot: class and slot, e.g. "Qwen3RMSNorm.rms_norm"; of an op that is selected per model "model", or the class of
            the sub-model; of an override without effect, its glob.
        modules: FQNs of the module instances.
        chosen: kernel name, "eager", "absent" for a field that names what the architecture lacks, or "replaced" where
            another implementation than eager was set on the model itself since it was bound; `why` names it.
        rejected: (name, reason) of every other implementation.
        wrappers: what is applied to the kernel, e.g. "expert parallel".
        runs: where `chosen` is eager and Transformers has several implementations, the one that runs, e.g. "sdpa".
    """

    slot: str
    op: str
    variant: str
    chosen: str
    why: str
    rejected: tuple[tuple[str, str], ...]
    modules: tuple[str, ...] = ()
    wrappers: tuple[str, ...] = ()
    runs: str = ""

    @property
    def kernel(self) -> str:
        """What runs, e.g. "triton + expert parallel" or "eager (Transformers' sdpa)"."""
        eager = f"{self.chosen} (Transformers' {self.runs})" if self.runs and not self.wrappers else self.chosen
        return " + ".join([eager, *self.wrappers])


@dataclass(frozen=True)
class BindingReport:
    """What `bind`, `apply` and `explain` return; prints as a table.

    Attributes:
        dtype: the model's compute dtype, which decides as much as the device does; the kernel of a module of another
            dtype was selected for its own.
    """

    rows: tuple[BindingRow, ...]
    device: str = ""
    note: str = ""
    dtype: str = ""
    skipped: tuple[SkippedPart, ...] = ()

    def __iter__(self) -> Iterator[BindingRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)

    def chosen(self, op: str, variant: str | None = None) -> tuple[str, ...]:
        """Distinct kernels of an op."""
        found = (row.chosen for row in self.rows if row.op == op and variant in (None, row.variant))
        return tuple(dict.fromkeys(found))

    def __str__(self) -> str:
        title = f"kernels on {self.device}" if self.device else "kernels"
        title += f", {self.dtype}" if self.dtype else ""
        cells = [(_count(row.slot, row.modules), f"{row.op}/{row.variant}", row.kernel, row.why) for row in self.rows]
        parts = [(part.symbol, part.op, part.reason) for part in self.skipped]
        tables = [
            [title, *format_table(("slot", "op", "kernel", "why"), cells)] if cells else [],
            format_table(("op", "rejected", "why"), rejected) if (rejected := self._rejections()) else [],
            format_table(("without a slot", "op", "why"), parts) if parts else [],
            [self.note] if self.note else [],
        ]
        return "\n\n".join("\n".join(table) for table in tables if table) or title

    def _rejections(self) -> list[tuple[str, str, str]]:
        """One line per op and reason; implementations that share the reason share the line."""
        groups: dict[tuple[str, str], list[str]] = {}
        for row in self.rows:
            for name, reason in row.rejected:
                names = groups.setdefault((f"{row.op}/{row.variant}", reason), [])
                if name not in names:
                    names.append(name)
        return [(op, ", ".join(names), reason) for (op, reason), names in groups.items()]


Runs = Mapping[tuple[str, str], str | None]
"""By module and slot, which of Transformers' implementations runs."""


def make_report(
    binding: Binding, runs: Runs, now: Runs, note: str, replaced: Mapping[str, str] | None = None
) -> BindingReport:
    """The table of a binding.

    Args:
        runs: what ran when the model was bound.
        now: what runs now.
        replaced: by module, what replaced its forward since it was bound.
    """
    rows = rows_of(binding.slots, runs, now, replaced or {})
    rows += [BindingRow(absent.where, absent.op_name, "-", "absent", absent.why, ()) for absent in binding.absent]
    # The row of a sub-model has the reason of the parts in it.
    shown = {(s.op.name, path) for s in binding.slots if not s.slot for path in (s.path, *s.parts)}
    skipped = tuple(
        part for part in binding.skipped if shown.isdisjoint((part.op.split("/")[0], path) for path in part.modules)
    )
    return BindingReport(tuple(rows), str(binding.device), note, binding.model_dtype, skipped)


def rows_of(slots: Iterable[SlotBinding], runs: Runs, now: Runs, replaced: Mapping[str, str]) -> list[BindingRow]:
    """The rows of some slots; see `make_report`."""
    groups: dict[BindingRow, list[str]] = {}
    for slot in slots:
        at = slot.path, slot.key
        by = replaced.get(slot.path, "") if slot.slot and slot.resolution.chosen != "eager" else ""
        groups.setdefault(_row(slot, runs.get(at), now.get(at), by), []).append(slot.path)
    # A model that is selected for as a whole is not named.
    return [
        replace(row, modules=() if row.slot == "model" and paths == [""] else tuple(paths))
        for row, paths in groups.items()
    ]


def _row(slot: SlotBinding, then: str | None, now: str | None, replaced_by: str) -> BindingRow:
    r = slot.resolution
    label = f"{slot.owner}.{slot.slot}" if slot.slot else slot.owner if slot.path else "model"
    chosen, why, wrappers = r.chosen, r.why, tuple(wrapper.name for wrapper in slot.wrappers)
    if now != then:
        chosen = "eager" if now == "eager" else "replaced"
        why, wrappers = f"the model was set to Transformers' {now!r} after opslot bound {r.chosen}", ()
    if replaced_by:
        why += f"; {replaced_by} replaced the module's forward since, so it runs only where that calls the original"
    return BindingRow(
        label, r.op_name, r.variant, chosen, why, r.rejected, (), wrappers, (now or "") if chosen == "eager" else ""
    )


def _count(slot: str, modules: Sequence[str]) -> str:
    return f"{slot} x{len(modules)}" if len(modules) > 1 else slot


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Left-aligned columns; the last one is left ragged so that long reasons stay on their line."""
    widths = [max(len(str(row[i])) for row in [header, *rows]) for i in range(len(header) - 1)]

    def line(cells: Sequence[str]) -> str:
        fixed = "  ".join(str(cell).ljust(width) for cell, width in zip(cells, widths, strict=False))
        return f"{fixed}  {cells[-1]}".rstrip()

    return [line(header), line(["-" * w for w in widths] + ["-" * len(header[-1])]), *(line(r) for r in rows)]
