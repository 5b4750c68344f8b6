"""Tables for the terminal."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from opslot.slots import BindingReport


def make_console() -> Console:
    """A console on standard output, at least 120 columns wide unless it is a terminal; silent on ranks other than 0."""
    from rich.console import Console

    quiet = os.environ.get("RANK", "0") != "0"
    console = Console(quiet=quiet)
    return console if console.is_terminal else Console(width=max(console.width, 120), quiet=quiet)


def kernel_table(report: BindingReport) -> Table:
    """A binding report without the rejected kernels, which are in kernels.txt."""
    from rich import box
    from rich.table import Table

    table = Table(title=f"kernels on {report.device or 'this machine'}", box=box.SIMPLE_HEAD, title_justify="left")
    for name, style in {"op": "", "kernel": "bold cyan", "where": "dim", "why": ""}.items():
        table.add_column(name, style=style, overflow="fold")
    for row in report:
        owner = row.slot.split(".")[0]
        where = f"{owner} x{len(row.modules)}" if len(row.modules) > 1 else owner
        table.add_row(f"{row.op}/{row.variant}", row.kernel, where, row.why)
    return table
