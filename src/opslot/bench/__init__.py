"""Benchmarks of ops and of training steps."""

from opslot.bench.files import OutputFiles
from opslot.bench.ops import bench_ops, call_sites_of, time_forward_backward
from opslot.bench.options import BenchOptions
from opslot.bench.result import (
    Environment,
    LossCurve,
    OpRow,
    Result,
    Run,
    StepRow,
    Value,
    merge,
    read,
    recorded_command,
    to_json,
)
from opslot.bench.run import run_bench
from opslot.bench.timing import Time, measure
from opslot.bench.tune import timings_of

__all__ = [
    "BenchOptions",
    "Environment",
    "LossCurve",
    "OpRow",
    "OutputFiles",
    "Result",
    "Run",
    "StepRow",
    "Time",
    "Value",
    "bench_ops",
    "call_sites_of",
    "measure",
    "merge",
    "read",
    "recorded_command",
    "run_bench",
    "time_forward_backward",
    "timings_of",
    "to_json",
]
