"""The table that says which kernel stands where, and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class BindingRow:
    """One group of slots that share a class, a choice and its reasons.

    Attributes:
        site: class and slot, e.g. "Qwen3RMSNorm.rms_norm"; "model" for a choice that holds for a whole model; of an
            override that reaches nothing, its glob.
        modules: paths of the module instances.
        chosen: kernel name, "eager", "absent" for a field that names what the architecture lacks, or "replaced" where
            another implementation than eager was set on the model itself since it was bound; `why` names it.
        rejected: (name, reason) of every other implementation.
    """

    site: str
    op: str
    variant: str
    chosen: str
    why: str
    rejected: tuple[tuple[str, str], ...]
    modules: tuple[str, ...] = ()


@dataclass(frozen=True)
class BindingReport:
    """What `bind`, `apply` and `explain` return; prints as a table.

    Attributes:
        dtype: the model's compute dtype, which decides as much as the device does; a module of another was asked by its
            own.
    """

    rows: tuple[BindingRow, ...]
    device: str = ""
    note: str = ""
    dtype: str = ""

    def __iter__(self) -> Iterator[BindingRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)

    def chosen(self, op: str, variant: str | None = None) -> tuple[str, ...]:
        """Distinct choices for an op."""
        found = (row.chosen for row in self.rows if row.op == op and variant in (None, row.variant))
        return tuple(dict.fromkeys(found))

    def __str__(self) -> str:
        title = f"kernels on {self.device}" if self.device else "kernels"
        title += f", {self.dtype}" if self.dtype else ""
        chosen = format_table(
            ("site", "op", "chosen", "why"),
            [(_site(row), f"{row.op}/{row.variant}", row.chosen, row.why) for row in self.rows],
        )
        rejected = format_table(("op", "rejected", "why"), self._rejections())
        return "\n".join(
            [title, *chosen, *(["", *rejected] if len(rejected) > 2 else []), *(["", self.note] if self.note else [])]
        )

    def _rejections(self) -> list[tuple[str, str, str]]:
        """One line per op and reason; implementations that share the reason share the line."""
        groups: dict[tuple[str, str], list[str]] = {}
        for row in self.rows:
            for name, reason in row.rejected:
                names = groups.setdefault((f"{row.op}/{row.variant}", reason), [])
                if name not in names:
                    names.append(name)
        return [(op, ", ".join(names), reason) for (op, reason), names in groups.items()]


def _site(row: BindingRow) -> str:
    return f"{row.site} x{len(row.modules)}" if len(row.modules) > 1 else row.site


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Left-aligned columns; the last one is left ragged so that long reasons stay on their line."""
    widths = [max(len(str(row[i])) for row in [header, *rows]) for i in range(len(header) - 1)]

    def line(cells: Sequence[str]) -> str:
        fixed = "  ".join(str(cell).ljust(width) for cell, width in zip(cells, widths, strict=False))
        return f"{fixed}  {cells[-1]}".rstrip()

    return [line(header), line(["-" * w for w in widths] + ["-" * len(header[-1])]), *(line(r) for r in rows)]
