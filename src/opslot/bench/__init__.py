"""Measurements of ops and of training steps."""

from opslot.bench.ops import Site, bench, sites_of, time_both_ways
from opslot.bench.rows import BenchRow, as_dict, environment, read_row
from opslot.bench.step import WARM_UP, compare_curves, draw_weights, measure_steps
from opslot.bench.timing import Ceilings, Time, measure, measure_ceilings
from opslot.bench.tune import timings_of

__all__ = [
    "WARM_UP",
    "BenchRow",
    "Ceilings",
    "Site",
    "Time",
    "as_dict",
    "bench",
    "compare_curves",
    "draw_weights",
    "environment",
    "measure",
    "measure_ceilings",
    "measure_steps",
    "read_row",
    "sites_of",
    "time_both_ways",
    "timings_of",
]
