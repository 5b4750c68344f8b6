"""`opslot kernels`: every implementation of every op, and whether this machine can run it."""

from __future__ import annotations

import argparse
import json
from typing import Any

from opslot._base.device import machine_devices
from opslot.slots import KERNEL_REGISTRY, format_table


def run(options: argparse.Namespace) -> int:
    """Print the list; exit code 0."""
    rows = kernel_rows(options.op)
    if options.json:
        print(json.dumps(rows, indent=2))
        return 0
    header = ("op", "variant", "name", "usable", "reason")
    body = [(r["op"], r["variant"], r["name"], "yes" if r["usable"] else "no", r["reason"]) for r in rows]
    print(f"kernels on {', '.join(str(d) for d in machine_devices())}")
    print("\n".join(format_table(header, body)))
    return 0


def kernel_rows(op: str | None = None) -> list[dict[str, Any]]:
    """One row per (op, variant, implementation): op, variant, name, usable, reason."""
    ops = [KERNEL_REGISTRY.op(op)] if op else list(KERNEL_REGISTRY.ops.values())
    rows: list[dict[str, Any]] = []
    for spec_op in ops:
        own = "Transformers' own code" if spec_op.bound_to_model else "torch's own"
        for variant in spec_op.variants:
            rows.append(_row(spec_op.name, variant, "eager", True, own))
            for spec in KERNEL_REGISTRY.specs(spec_op.name, variant):
                reason = spec.unsupported_here()
                rows.append(_row(spec_op.name, variant, spec.name, reason is None, reason or spec.description))
    return rows


def _row(op: str, variant: str, name: str, usable: bool, reason: str) -> dict[str, Any]:
    return {"op": op, "variant": variant, "name": name, "usable": usable, "reason": reason}
