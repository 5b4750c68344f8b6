"""The terminal that a run prints to."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def make_console() -> Console:
    """A console on standard output, at least 120 columns wide unless it is a terminal; silent on ranks other than 0."""
    from rich.console import Console

    quiet = os.environ.get("RANK", "0") != "0"
    console = Console(quiet=quiet)
    return console if console.is_terminal else Console(width=max(console.width, 120), quiet=quiet)
