"""Collecting all problems of a checkpoint in one error."""

from __future__ import annotations

import textwrap

from opslot._base.errors import CheckpointError, error_text, list_problems


class Problems:
    """Problems by kind; `raise_if_any` raises them as one `CheckpointError`."""

    def __init__(self, subject: str) -> None:
        self._subject = subject
        self._kinds: dict[str, tuple[list[str], str]] = {}

    def add(self, kind: str, item: str, hint: str) -> None:
        """Add `item` to `kind`, whose `hint` is shown once."""
        self._kinds.setdefault(kind, ([], hint))[0].append(item)

    def raise_if_any(self) -> None:
        """Raises: CheckpointError if there is a problem."""
        if self._kinds:
            parts = [
                error_text(list_problems(f"{kind} ({len(items)})", items), hint=hint)
                for kind, (items, hint) in self._kinds.items()
            ]
            raise CheckpointError("\n".join([self._subject, *(textwrap.indent(part, "  ") for part in parts)]))
