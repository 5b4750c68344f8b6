"""A benchmark's result as plots: one panel per comparison, opslot in color."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from opslot.bench.result import LossCurve, OpRow, Result, StepRow, by_comparison, steps_by_comparison
from opslot.bench.table import significant

_OWN, _EAGER, _OTHER, _ROOFLINE, _INK = "#1f6feb", "#d5dae1", "#a3adb9", "#d1242f", "#1f2933"
_COLUMNS = 3
# Formats that `draw` writes, by the file's ending.
PLOT_FORMATS = (".png", ".svg")


def draw(result: Result, path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Bars of every implementation with a passed check, opslot's own in color, and the roofline as a dashed line.

    Then tokens/s of the training steps and the loss curve, where there are any. A result without anything to draw, as
    before the first training step, makes no file.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    ops = [
        (comparison, valid)
        for comparison, group in by_comparison(result.ops).items()
        if (valid := [r for r in group if r.valid])
    ]
    steps = steps_by_comparison([s for s in result.steps if s.valid])
    panels = len(ops) + len(steps) + bool(result.curve)
    if not panels:
        return
    columns = min(_COLUMNS, panels)
    lines = -(-panels // columns)
    heights = [len(group) for _, group in ops] + [len(g) for g in steps.values()] + [5 if result.curve else 0, 3]
    figure = Figure(figsize=(5.2 * columns, (0.9 + 0.3 * max(heights)) * lines + 0.7), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(lines, columns, squeeze=False).flat)
    for axis, (comparison, group) in zip(axes, ops, strict=False):
        _draw_op(axis, comparison, group)
    rest = axes[len(ops) :]
    for name, trained in steps.items():
        _draw_steps(rest.pop(0), name, trained)
    if result.curve:
        _draw_curve(rest.pop(0), result.curve)
    for axis in rest:
        axis.axis("off")
    figure.suptitle(_title(result, bool(ops)), fontsize=11, color=_INK)
    figure.savefig(path, metadata=dict(metadata or {}))


def _title(result: Result, ops: bool) -> str:
    devices = dict.fromkeys(run.environment.device for run in result.runs)
    dates = sorted({run.environment.date for run in result.runs})
    what = "forward + backward in ms, shorter is better; blue: opslot's own kernels; dashed: roofline\n" if ops else ""
    return f"{what}{', '.join(devices)}, {' to '.join(dict.fromkeys((dates[0], dates[-1])))}"


def _draw_op(axis: Any, comparison: tuple[str, str, str], group: Sequence[OpRow]) -> None:
    op, variant, case = comparison
    values = {r.kernel: r.ms or 0.0 for r in group}
    colors = [_OWN if r.origin == "opslot" else _EAGER if r.kernel == "eager" else _OTHER for r in group]
    _draw_bars(axis, values, colors, axis_limit(list(values.values())))
    if group[0].roofline_ms:
        axis.axvline(group[0].roofline_ms, color=_ROOFLINE, linewidth=1.2, linestyle="--")
    axis.set_title(f"{op}/{variant}\n{case}", fontsize=9, loc="left", color=_INK)


def _draw_steps(axis: Any, name: str, steps: Sequence[StepRow]) -> None:
    ranked = sorted(steps, key=lambda s: -(s.tokens_per_s or 0.0))
    values = {s.implementation: s.tokens_per_s or 0.0 for s in ranked}
    colors = [_OWN if s.own else _EAGER if s.implementation.endswith("eager") else _OTHER for s in ranked]
    _draw_bars(axis, values, colors, max(values.values()))
    axis.set_title(f"training step, tokens/s per GPU, longer is better\n{name}", fontsize=9, loc="left", color=_INK)


def axis_limit(values: Sequence[float]) -> float:
    """Where bars end: at the longest, unless some are so long that the others would look alike."""
    ranked = sorted(values)
    for shorter, longer in itertools.pairwise(ranked[1:]):
        if longer > 3 * shorter:
            return 1.25 * shorter
    return ranked[-1] if ranked else 1.0


def _draw_bars(axis: Any, values: Mapping[str, float], colors: Sequence[str], limit: float) -> None:
    axis.barh(list(values), [min(v, limit) for v in values.values()], color=colors, height=0.7)
    # From the top down; a single bar is as thick as one of three.
    axis.set_ylim(max(len(values), 3) - 0.5, -0.5)
    for i, value in enumerate(values.values()):
        if value > limit:
            _draw_break(axis, 0.9 * limit, i, limit)
        # On white, where the roofline crosses it.
        behind = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 0.8}
        axis.annotate(
            significant(value),
            (min(value, limit), i),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            color=_INK,
            bbox=behind,
        )
    axis.set_xlim(0, 1.22 * limit)
    axis.locator_params(axis="x", nbins=5)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(labelsize=8, colors=_INK)


def _draw_break(axis: Any, x: float, y: float, limit: float) -> None:
    """Two slanted lines with a gap between them: the bar is longer than it is drawn."""
    width, slant = 0.016 * limit, 0.012 * limit
    corners = [
        (x - slant, y + 0.42),
        (x + slant, y - 0.42),
        (x + slant + width, y - 0.42),
        (x - slant + width, y + 0.42),
    ]
    axis.fill(*zip(*corners, strict=True), color="white", zorder=3)
    for left, right in ((corners[0], corners[1]), (corners[3], corners[2])):
        axis.plot(*zip(left, right, strict=True), color=_INK, linewidth=0.9, zorder=4)


def _draw_curve(axis: Any, curve: LossCurve) -> None:
    axis.plot(curve.losses["Transformers"], color=_OTHER, linewidth=3, label="Transformers")
    axis.plot(curve.losses["opslot"], color=_OWN, linewidth=1, label="opslot")
    axis.set_title(
        f"loss, {curve.steps} steps of text: at most {curve.distance.largest:.4f} apart\n"
        f"(Transformers from itself, by rounding alone: {curve.rounding.largest:.4f})",
        fontsize=9,
        loc="left",
        color=_INK,
    )
    axis.set_xlabel("step", fontsize=8, color=_INK)
    axis.legend(loc="upper right", frameon=False, fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(labelsize=8, colors=_INK)
