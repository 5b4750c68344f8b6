"""Training steps of the two 8-layer models of the goals, each contender in a process of its own.

    python benchmarks/gpu_step.py --model dense moe --against hf,liger --output FILE [any option of `opslot bench`]

A short name for `opslot bench --step-only --model benchmarks/models/<model>.json`, once per model; `FILE` becomes
`FILE-<model>`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from opslot.cli import main as opslot

MODELS = Path(__file__).parent / "models"
NAMES = {"dense": "qwen3_8b_width", "moe": "qwen3_30b_a3b_width"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=list(NAMES), choices=list(NAMES))
    parser.add_argument("--output", type=Path)
    options, others = parser.parse_known_args()
    failed = 0
    for name in options.model:
        output = options.output and options.output.with_name(f"{options.output.stem}-{name}{options.output.suffix}")
        arguments = ["bench", "--step-only", "--model", str(MODELS / f"{NAMES[name]}.json"), *others]
        print(f"== {name}", flush=True)
        failed |= opslot([*arguments, "--output", str(output)] if output else arguments)
    return failed


if __name__ == "__main__":
    sys.exit(main())
