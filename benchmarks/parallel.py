"""Training steps over several GPUs of one host, opslot beside VeOmni on the same machine: one run, one result file.

    python benchmarks/parallel.py --gpus 4 [CONFIGURATION[+OPTION=VALUE] ...] [--baseline-path veomni=DIR] --output FILE

The configurations are those of `parallel_workers/workload.py`; default all. An OPTION is one of opslot's
`parallelize`, as in moe-fsdp+copy_engine=False or dense-sp+ulysses_overlap=True. Each library runs in processes
of its own (torchrun); VeOmni only where --baseline-path names a folder with it and the Transformers that it pins.
All libraries start from the same weights, and the losses of each must match those of another.
fp32 master weights, bfloat16 computation, gradients reduced in fp32 and clipped, AdamW; no activation checkpointing
except for the video, which only opslot trains.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from opslot._base.device import best_device
from opslot.bench.files import OutputFiles
from opslot.bench.result import Environment, Result, Run, StepRow, recorded_command
from opslot.bench.step import loss_check, process_environment
from opslot.bench.table import steps_table
from opslot.cli.arguments import pairs

WORKERS = Path(__file__).parent / "parallel_workers"


def measure(worker: str, path: str | None, arguments: list[str], options: argparse.Namespace) -> Iterator[StepRow]:
    """The rows of one library, in the order measured; what its processes print goes to stderr."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.jsonl"
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.gpus}"]
        command = [*torchrun, str(WORKERS / worker), *arguments, "--rows", str(file)]
        command += ["--steps", str(options.steps)]
        command += ["--layers", str(options.layers)] if options.layers is not None else []
        command += ["--shrink", str(options.shrink)] if options.shrink > 1 else []
        done = subprocess.run(command, env=process_environment(path), stdout=sys.stderr)
        lines = file.read_text().splitlines() if file.exists() else []
        yield from (StepRow(**json.loads(line)) for line in lines)
        if done.returncode:
            print(f"{worker} failed with exit code {done.returncode}", file=sys.stderr)


def check_losses(rows: Sequence[StepRow]) -> list[StepRow]:
    """The rows with their check: whether first and last loss match those of another library, and of opslot with other
    options or another mesh where no other library ran."""
    return [row if row.error else replace(row, check=_check_of(row, rows)) for row in rows]


def _check_of(row: StepRow, rows: Sequence[StepRow]) -> str:
    same = [other for other in rows if other is not row and not other.error and _trains_the_same(row, other)]
    same.sort(key=lambda other: _library(other) == _library(row))
    return loss_check(row, same[0]) if same else "unchecked: nothing else trained the same"


def _trains_the_same(row: StepRow, other: StepRow) -> bool:
    """Whether two rows have the same model and global batch."""
    return all(getattr(row, name) == getattr(other, name) for name in ("model", "batch", "length", "gpus"))


def _library(row: StepRow) -> str:
    return row.implementation.partition(" ")[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configurations", nargs="*", help="default all")
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--layers", type=int, help="default those of the model's file")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="opslot's ops_implementation")
    parser.add_argument("--baseline-path", action="append", default=[], metavar="NAME=DIR")
    parser.add_argument("--shrink", type=int, default=1, help="divide widths and lengths, to try it on a CPU")
    parser.add_argument("--commit", help="commit to record where there is no git")
    parser.add_argument("--output", help="write the result as JSON")
    options = parser.parse_args()
    files = OutputFiles(options.output)
    paths = pairs("--baseline-path", "NAME=DIR", options.baseline_path)
    device = Environment.current(best_device().torch_type, options.commit)
    run = Run(recorded_command("python", *sys.argv), device, list(paths))
    overrides = [part for item in options.set for part in ("--set", item)]
    libraries = [("opslot_worker.py", None, [*options.configurations, *overrides])]
    if "veomni" in paths:
        plain = dict.fromkeys(name.partition("+")[0] for name in options.configurations)
        libraries.append(("veomni_worker.py", paths["veomni"], list(plain)))
    for worker, path, arguments in libraries:
        run.steps[:] = check_losses([*run.steps, *measure(worker, path, arguments, options)])
        files.write(Result("benchmarks/parallel.py", [run]))
    print(steps_table(run.steps))
    return 0 if run.steps else 1


if __name__ == "__main__":
    sys.exit(main())
