"""Benchmarks of ops and of training steps."""

from opslot.bench.files import OutputFiles
from opslot.bench.ops import CallSite, bench_ops, call_sites_of, time_forward_backward
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
from opslot.bench.run import BenchOptions, run_bench
from opslot.bench.timing import Peak, Time, measure, measure_peak
from opslot.bench.tune import timings_of

__all__ = [
    "BenchOptions",
    "CallSite",
    "Environment",
    "LossCurve",
    "OpRow",
    "OutputFiles",
    "Peak",
    "Result",
    "Run",
    "StepRow",
    "Time",
    "Value",
    "bench_ops",
    "call_sites_of",
    "measure",
    "measure_peak",
    "merge",
    "read",
    "recorded_command",
    "run_bench",
    "time_forward_backward",
    "timings_of",
    "to_json",
]
