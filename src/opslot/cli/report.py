"""`opslot report`: one HTML page about a training run."""

from __future__ import annotations

import argparse
from pathlib import Path

from opslot.trainer.report import write_report


def run(options: argparse.Namespace) -> int:
    """Write the page; exit code 0."""
    output = Path(options.output) if options.output else None
    print(f"wrote {write_report(Path(options.folder), output)}")
    return 0
