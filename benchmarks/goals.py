"""The goals of training steps on an H200, what was measured, and how much of a step its matmuls need at least."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from opslot import count_flops
from opslot.bench.result import Result, StepRow
from opslot.models import load_config
from opslot.verify.random_model import class_of


class Goal(NamedTuple):
    """A goal of a model of `benchmarks/models`: tokens/s, or a multiple of the fastest other library's.

    Attributes:
        model: of the rows; the name of a file, to which another run appends.
        fp8: of opslot in FP8, not of the fastest in bf16.
    """

    model: str
    times: float = 0.0
    tokens_per_s: float = 0.0
    fp8: bool = False


GOALS = (
    Goal("qwen3_8b_width", 1.1),
    Goal("qwen3_8b_width", tokens_per_s=52_000, fp8=True),
    Goal("qwen3_0.6b", tokens_per_s=120_000),
    Goal("qwen3_0.6b_1x2048_graphs", tokens_per_s=80_000),
    Goal("gemma3_12b_width", 1.5),
    Goal("qwen3_30b_a3b_width", 1.4),
    Goal("qwen3_30b_a3b_width_2", tokens_per_s=90_000, fp8=True),
    Goal("gpt_oss_20b_width", 1.3),
    Goal("moonlight_width", 1.3),
    Goal("glm_4.5_air_width", 1.3),
    Goal("qwen3.5_9b_width", 1.3),
    Goal("qwen3.5_35b_a3b_width", 1.3),
    Goal("qwen3_vl_8b_width", 1.5),
    Goal("qwen3_vl_30b_a3b_width", 1.5),
)


def lines(result: Result, tflops: float, models: Path) -> Iterator[tuple[str, list[str]]]:
    """The rows' model and cells.

    Args:
        tflops: rate of large matmuls in bf16, TFLOP/s.
        models: the folder of the configs.
    """
    for goal in GOALS:
        # FP8 is another precision: its losses are shown, not required to match.
        rows = [r for r in result.steps if r.model == goal.model and r.tokens_per_s and (r.valid or goal.fp8)]
        fastest = max((row for row in rows if row.own and ("FP8" in row.implementation) == goal.fp8), key=_rate)
        other = max((row for row in rows if not row.own), key=_rate, default=None)
        tokens = goal.tokens_per_s or goal.times * _rate(other)
        if goal.tokens_per_s:
            dtype = " in FP8" if goal.fp8 else ""
            off = f", loss {fastest.loss_difference} off" if fastest.loss_difference else ""
            wanted, found = f"{tokens:,.0f} tokens/s{dtype}", f"{_rate(fastest):,.0f} tokens/s{off}"
        else:
            wanted, found = f"{goal.times:g} x {_library(other)}", f"{_rate(fastest) / _rate(other):.2f} x"
        ms = fastest.ms or 0.0
        reached = _rate(fastest) / tokens
        matmuls = "-" if goal.fp8 else f"{_matmul_ms(fastest, tflops, models):.0f}"
        yield goal.model, [wanted, found, f"{reached - 1:+.1%}", f"{ms:.0f}", f"{ms * reached:.0f}", matmuls]


def _rate(row: StepRow | None) -> float:
    return (row.tokens_per_s if row else None) or 0.0


def _library(row: StepRow | None) -> str:
    return row.implementation.partition(" + ")[0] if row else "-"


def _matmul_ms(row: StepRow, tflops: float, models: Path) -> float:
    """Milliseconds that the matmuls of a step take at `tflops`: linear layers, experts and head, not attention."""
    config = next(path for path in sorted(models.glob("*.json"), reverse=True) if row.model.startswith(path.stem))
    return _matmul_flops(config, row.batch, row.length, row.image_size) / tflops / 1e9


@functools.cache
def _matmul_flops(config: Path, batch: int, length: int, image_size: int) -> float:
    loaded = load_config(config)
    with torch.device("meta"):
        model = class_of(loaded)(loaded)
    patches = tokens = 0
    if image_size:
        vision = loaded.vision_config
        patches = (image_size // vision.patch_size) ** 2
        tokens = patches // vision.spatial_merge_size**2
    count = count_flops(model, [length + tokens] * batch, patches=[patches] * batch if patches else ())
    return sum(part.total for name, part in count.parts.items() if "attention" not in name)
