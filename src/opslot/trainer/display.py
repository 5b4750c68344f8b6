"""Tables for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from opslot.slots import BindingReport


def kernel_table(report: BindingReport) -> Table:
    """A binding report without its rejected kernels, which kernels.txt has."""
    from rich import box
    from rich.table import Table

    table = Table(title=f"kernels on {report.device or 'this machine'}", box=box.SIMPLE_HEAD, title_justify="left")
    for name, style in {"site": "", "op": "dim", "kernel": "bold cyan", "why": ""}.items():
        table.add_column(name, style=style, overflow="fold")
    for row in report:
        site = f"{row.site} x{len(row.modules)}" if len(row.modules) > 1 else row.site
        table.add_row(site, f"{row.op}/{row.variant}", row.chosen, row.why)
    return table
