"""Collecting all problems of a checkpoint in one error."""

from __future__ import annotations

from collections.abc import Iterable

from opslot._base.errors import CheckpointError

SHOWN = 10


def listed(items: Iterable[str]) -> str:
    """The first ten items, one per line, and the number of the others."""
    items = list(items)
    lines = [f"    {item}" for item in items[:SHOWN]]
    if len(items) > SHOWN:
        lines.append(f"    ... and {len(items) - SHOWN} more")
    return "\n".join(lines)


class Problems:
    """Problems by kind; `raise_if_any` raises them as one `CheckpointError`."""

    def __init__(self, subject: str) -> None:
        self._subject = subject
        self._kinds: dict[str, tuple[list[str], str]] = {}

    def add(self, kind: str, item: str, hint: str) -> None:
        """Add `item` to `kind`, whose `hint` is shown once."""
        self._kinds.setdefault(kind, ([], hint))[0].append(item)

    def message(self) -> str | None:
        """The error's text, or None without problems."""
        if not self._kinds:
            return None
        parts = [
            f"  {kind} ({len(items)}):\n{listed(items)}\n    hint: {hint}"
            for kind, (items, hint) in self._kinds.items()
        ]
        return "\n".join([self._subject, *parts])

    def raise_if_any(self) -> None:
        """Raises: CheckpointError if there is a problem."""
        message = self.message()
        if message is not None:
            raise CheckpointError(message)
