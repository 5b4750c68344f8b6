"""Tokens/s and peak memory of LoRA and QLoRA on one GPU, beside other libraries: one run, one result file.

    python benchmarks/lora.py [--models FILE ...] [--only TEXT ...] [--implementations NAME ...] --output FILE

Rows: LoRA of rank 16 on every linear layer, and for a model with experts on their stacked weights; QLoRA (nf4), for a
model with experts with adapters on attention. Implementations: opslot; PEFT with Transformers' own code and SDPA, whose
step TRL's SFTTrainer runs; PEFT with Liger-Kernel; and Unsloth. All start from the same weights and adapters, in
bfloat16, and train on the same tokens with AdamW. Each row runs in a process of its own, and is written when it is
done. A row's check compares the loss and the gradient of the first step with PEFT's.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fine_tuning_step import PACKAGES, Task, run_rows, shrunk

from opslot._base.device import best_device
from opslot.bench.files import OutputFiles
from opslot.bench.result import Environment, Result, Run, StepRow, recorded_command
from opslot.bench.table import steps_table

MODELS = Path(__file__).parent / "models"
# Relative; a norm of bfloat16 gradients that are summed in another order.
_LOSS_TOLERANCE, _NORM_TOLERANCE = 2.0**-8, 0.03
_NORM = "gradient norm "


def tasks(models: Sequence[Path], layers: int | None, shrink: int, batch: int, length: int, steps: int) -> list[Task]:
    """The rows; what compares LoRA of whole models comes first."""
    found = []
    for method, memory in (("lora", "none"), ("qlora", "none"), ("lora", "full")):
        for file in models:
            config = shrunk(json.loads(file.read_text()), layers, shrink)
            # The auxiliary loss of a router is not part of fine-tuning, and not every library adds it.
            config.pop("output_router_logits", None)
            experts = "num_experts" in config
            for name in PACKAGES:
                # PEFT and bitsandbytes do not quantize stacked experts.
                if method == "qlora" and experts and name.startswith("PEFT"):
                    continue
                found.append(
                    Task(
                        name=file.stem if layers is None else f"{file.stem}_{layers}",
                        implementation=name,
                        config=config,
                        method=method,
                        memory=memory,
                        batch=batch,
                        length=length // shrink,
                        steps=steps,
                        experts=experts and method == "lora",
                    )
                )
    return found


def checked(rows: Sequence[StepRow]) -> list[StepRow]:
    """The rows with their check in place of their gradient's norm."""
    references = {row.comparison: row for row in rows if row.implementation == "PEFT" and not row.error}
    return [row if row.error else replace(row, check=_check(row, references.get(row.comparison))) for row in rows]


def _check(row: StepRow, reference: StepRow | None) -> str:
    if not row.check.startswith(_NORM):
        return row.check
    if reference is None or not reference.check.startswith(_NORM):
        return "unchecked: PEFT did not run"
    found, expected = (
        {"loss": (r.first_loss or 0.0, _LOSS_TOLERANCE), "gradient": (_norm(r), _NORM_TOLERANCE)}
        for r in (row, reference)
    )
    for name, (value, tolerance) in found.items():
        difference = abs(value / expected[name][0] - 1.0)
        if difference > tolerance:
            return f"WRONG: the {name} of the first step differs by {difference:.1%} from PEFT's"
    return "ok"


def _norm(row: StepRow) -> float:
    return float(row.check.removeprefix(_NORM))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ("qwen3_8b_width.json", "qwen3_30b_a3b_width.json")
    parser.add_argument("--models", type=Path, nargs="+", default=[MODELS / name for name in names])
    parser.add_argument("--layers", type=int, help="of the models; default as in their files")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--only", nargs="+", default=[], help="rows whose description has each of these texts")
    parser.add_argument("--implementations", nargs="+", choices=PACKAGES, default=list(PACKAGES))
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--shrink", type=int, default=1, help="divide widths and length, to try it on a CPU")
    parser.add_argument("--timeout", type=int, default=60, help="seconds for a row")
    parser.add_argument("--commit", help="commit to record where there is no git")
    parser.add_argument("--output", help="write the result as JSON")
    options = parser.parse_args()
    files = OutputFiles(options.output)
    environment = Environment.current(best_device().torch_type, options.commit)
    run = Run(recorded_command("python", *sys.argv), environment, [name for name in PACKAGES if name != "opslot"])
    rows = tasks(options.models, options.layers, options.shrink, options.batch, options.length, options.steps)
    rows = [task for task in rows if task.implementation in options.implementations]
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
        files.write(Result("benchmarks/lora.py", [replace(run, steps=checked(run.steps))]))
    print(steps_table(checked(run.steps)))
    return 0 if any(not row.error for row in run.steps) else 1


if __name__ == "__main__":
    sys.exit(main())
