"""causal_conv1d and chunk_gated_delta_rule on a GPU: proof and forward plus backward in bf16, at Qwen3-Next's sizes.

    python benchmarks/gpu_delta.py [--output FILE] [--commit ID] [--op NAME]

Beside opslot's kernels stands what Transformers runs without them ("hf eager"), which knows no packed documents. fla
tunes itself before its first call at each size, for minutes where no cache of Triton's has it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from opslot import KERNEL_REGISTRY
from opslot.slots import format_table
from opslot.testing.bench import BenchRow, as_dict, bench, environment, time_both_ways

OPS = ("causal_conv1d", "chunk_gated_delta_rule")
DEVICE = torch.device("cuda")


def upstream(op: str) -> Callable[..., Any]:
    """Transformers' own code, without the argument it would leave out."""
    from transformers.models.qwen3_next import modeling_qwen3_next as modeling

    if op == "chunk_gated_delta_rule":
        return modeling.torch_chunk_gated_delta_rule
    return lambda hidden_states, weight, activation: torch.nn.functional.silu(
        torch.nn.functional.conv1d(
            hidden_states, weight.unsqueeze(1), padding=weight.shape[1] - 1, groups=weight.shape[0]
        )[..., : hidden_states.shape[-1]]
    )


def upstream_rows(op: str) -> list[BenchRow]:
    variant = KERNEL_REGISTRY.op(op).variant("standard")
    found = []
    for case in variant.cases:
        if case.role != "bench":
            continue
        arguments = case.make(torch.bfloat16, DEVICE, torch.Generator(DEVICE).manual_seed(0))
        packed = arguments.pop("cu_seqlens", None) is not None
        row = BenchRow(op, "standard", case.name, "hf eager", "bfloat16")
        if op == "chunk_gated_delta_rule":
            groups = arguments["value"].shape[2] // arguments["key"].shape[2]
            arguments |= {n: arguments[n].repeat_interleave(groups, 2) for n in ("query", "key")}
        try:
            time, peak = time_both_ways(upstream(op), variant, arguments, DEVICE)
            verdict = "mixes documents" if packed else "ok"
            row = replace(row, ms=time.ms, alone_ms=time.alone_ms, peak_mib=peak, verdict=verdict)
        except Exception as error:
            row = replace(row, verdict=f"{type(error).__name__}: {str(error)[:120]}")
        torch.cuda.empty_cache()
        found.append(row)
    return found


def table(rows: list[BenchRow]) -> str:
    body = [
        (
            row.op,
            row.case,
            row.kernel,
            "-" if row.ms is None else f"{row.ms:.3f}",
            "-" if row.alone_ms is None else f"{row.alone_ms:.3f}",
            "-" if row.share is None else f"{row.share:.0%}",
            "-" if row.peak_mib is None else f"{row.peak_mib:.0f}",
            row.verdict,
        )
        for row in rows
    ]
    return "\n".join(format_table(("op", "case", "kernel", "ms", "alone", "of floor", "peak MiB", "check"), body))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--commit", help="of the code that runs, where there is no git")
    parser.add_argument("--op", choices=OPS, nargs="+", default=OPS)
    options = parser.parse_args()
    rows: list[BenchRow] = []
    for op in options.op:
        rows += [*bench(op, device=DEVICE, compiled=False), *upstream_rows(op)]
        print(table(rows), flush=True)
    if options.output:
        here = environment(DEVICE) | ({"commit": options.commit} if options.commit else {})
        found = {"environment": here, "rows": [as_dict(row) for row in rows]}
        options.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
