"""Peak memory and tokens/s of fine-tuning an 8B model on one GPU: one run, one result file.

    python benchmarks/memory.py [--only TEXT ...] [--lengths 8192 32768] --output FILE

Rows: full fine-tuning, LoRA and QLoRA, each without activation checkpointing, with selective and full checkpointing,
and with full checkpointing and offloaded activations. Beside opslot: PEFT with Transformers' own code (as in TRL),
Liger-Kernel with PEFT, and Unsloth, where they are installed. bfloat16 parameters, AdamW, one sequence a step, random
weights. Each row runs in a process of its own; one that runs out of memory is recorded with its error.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from fine_tuning_step import PACKAGES, Task, run_rows, shrunk

from opslot._base.device import best_device
from opslot.bench.files import OutputFiles
from opslot.bench.result import Environment, Result, Run, recorded_command
from opslot.bench.table import steps_table

METHODS = ("full", "lora", "qlora")
MEMORY = ("none", "selective", "full", "full, offload")


def tasks(lengths: list[int], **given: Any) -> list[Task]:
    """The rows, opslot's first; the baselines have no selective checkpointing, and Unsloth offloads by itself."""
    found = []
    for length in lengths:
        rows = [("opslot", method, memory) for method in METHODS for memory in MEMORY]
        for name in ("PEFT", "PEFT + Liger-Kernel"):
            rows += [(name, method, memory) for method in METHODS for memory in ("none", "full")]
        rows += [("Unsloth", method, "full, offload") for method in METHODS[1:]]
        found += [
            Task(implementation=name, method=method, memory=memory, batch=1, length=length, **given)
            for name, method, memory in rows
        ]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path(__file__).parent / "models" / "qwen3_8b_width.json")
    parser.add_argument("--layers", type=int, default=36, help="of the model; 36 is Qwen3-8B whole")
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--only", nargs="+", default=[], help="rows whose description has each of these texts")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--shrink", type=int, default=1, help="divide widths and lengths, to try it on a CPU")
    parser.add_argument("--timeout", type=int, default=240, help="seconds for a row")
    parser.add_argument("--commit", help="commit to record where there is no git")
    parser.add_argument("--output", help="write the result as JSON")
    options = parser.parse_args()
    config = shrunk(json.loads(options.model.read_text()), options.layers, options.shrink)
    files = OutputFiles(options.output)
    environment = Environment.current(best_device().torch_type, options.commit)
    run = Run(recorded_command("python", *sys.argv), environment, [name for name in PACKAGES if name != "opslot"])
    name = "qwen3_8b" if options.layers == 36 and options.shrink == 1 else f"{options.model.stem}_{options.layers}"
    lengths = [length // options.shrink for length in options.lengths]
    rows = tasks(lengths, name=name, config=config, steps=options.steps)
    for row in run_rows(
        [task for task in rows if all(part in task.description for part in options.only)], options.timeout
    ):
        run.steps.append(row)
        print(
            row.title,
            row.implementation,
            row.error or f"{row.tokens_per_s:,.0f} tokens/s, {row.peak_gib} GiB",
            flush=True,
        )
        files.write(Result("benchmarks/memory.py", [run]))
    print(steps_table(run.steps))
    return 0 if any(not row.error for row in run.steps) else 1


if __name__ == "__main__":
    sys.exit(main())
