"""`opslot convert`: an MoE checkpoint with its experts in another layout."""

from __future__ import annotations

import argparse

from opslot.checkpoint.convert import convert_folder


def run(options: argparse.Namespace) -> int:
    """Write the converted checkpoint; exit code 0."""
    written = convert_folder(
        options.source, options.destination, layout=options.layout, max_shard_size=options.max_shard_size
    )
    print(f"wrote {written}")
    return 0
