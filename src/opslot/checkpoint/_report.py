"""Collecting every problem of a checkpoint, so that one error tells them all."""

from __future__ import annotations

from collections.abc import Iterable

from opslot._base.errors import CheckpointError

SHOWN = 10


def listed(items: Iterable[str]) -> str:
    """The first ten items, one a line, and how many more there are."""
    items = list(items)
    lines = [f"    {item}" for item in items[:SHOWN]]
    if len(items) > SHOWN:
        lines.append(f"    ... and {len(items) - SHOWN} more")
    return "\n".join(lines)


class Problems:
    """Problems by kind; `raise_if_any` makes them one `CheckpointError`."""

    def __init__(self, subject: str) -> None:
        self._subject = subject
        self._kinds: dict[str, tuple[list[str], str]] = {}

    def add(self, kind: str, item: str, todo: str) -> None:
        """File `item` under `kind`; `todo` says once per kind what to do about it."""
        self._kinds.setdefault(kind, ([], todo))[0].append(item)

    def message(self) -> str | None:
        """The error's text, or None when nothing was filed."""
        if not self._kinds:
            return None
        parts = [
            f"  {kind} ({len(items)}):\n{listed(items)}\n    hint: {todo}"
            for kind, (items, todo) in self._kinds.items()
        ]
        return "\n".join([self._subject, *parts])

    def raise_if_any(self) -> None:
        """Raises: CheckpointError when a problem was filed."""
        message = self.message()
        if message is not None:
            raise CheckpointError(message)
