"""A benchmark's result as one picture: who wins where."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from opslot.bench import BenchRow
from opslot.bench.table import bar_limit, models, sites

_BEST, _REST, _FLOOR, _INK = "#1f6feb", "#a9b4c2", "#d1242f", "#1f2933"
_COLUMNS = 3
# Formats that `draw` writes, by the file's ending.
PICTURES = (".png", ".svg")


def draw(
    rows: Sequence[BenchRow],
    steps: Sequence[dict[str, Any]],
    curve: dict[str, Any] | None,
    environment: dict[str, Any],
    path: Path,
) -> None:
    """One panel per comparison: a bar per proven implementation, the fastest in blue, the floor as a dashed line.

    What failed its check is left out here; the table and the page name it. Then tokens/s of the training steps and the
    loss curve, where there are any. Nothing to draw yet, as before the first step of `--step-only`, makes no file.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    groups = [(site, proven) for site, group in sites(rows).items() if (proven := [r for r in group if r.counts])]
    done = models([s for s in steps if s.get("check") == "ok"])
    panels = len(groups) + len(done) + bool(curve)
    if not panels:
        return
    columns = min(_COLUMNS, panels)
    lines = -(-panels // columns)
    tallest = max([len(group) for _, group in groups] + [len(g) for g in done.values()] + [5 if curve else 0, 3])
    figure = Figure(figsize=(5.2 * columns, (0.9 + 0.3 * tallest) * lines + 0.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(lines, columns, squeeze=False).flat)
    for axis, (site, group) in zip(axes, groups, strict=False):
        _draw_op(axis, site, group)
    rest = axes[len(groups) :]
    for model, contenders in done.items():
        _draw_steps(rest.pop(0), model, contenders)
    if curve:
        _draw_curve(rest.pop(0), curve)
    for axis in rest:
        axis.axis("off")
    what = "forward + backward, ms; dashed: the floor\n" if groups else ""
    figure.suptitle(f"{what}{environment['device']}, {environment['date']}", fontsize=11, color=_INK)
    figure.savefig(path)


def _draw_op(axis: Any, site: tuple[str, str, str], group: list[BenchRow]) -> None:
    op, variant, case = site
    values = {r.kernel: r.ms or 0.0 for r in group}
    best = min(values, key=lambda k: values[k])
    _bars(axis, values, best, "{:.3g}", bar_limit(list(values.values())))
    if group[0].floor_ms:
        axis.axvline(group[0].floor_ms, color=_FLOOR, linewidth=1.2, linestyle="--")
    axis.set_title(f"{op}/{variant}\n{case}", fontsize=9, loc="left", color=_INK)


def _draw_steps(axis: Any, model: str, steps: list[dict[str, Any]]) -> None:
    values = {s["contender"]: s["tokens_per_s"] for s in steps}
    best = max(values, key=lambda k: values[k])
    _bars(axis, values, best, "{:,.0f}", values[best])
    axis.set_title(f"training step, tokens/s (longer is better)\n{model}", fontsize=9, loc="left", color=_INK)


def _bars(axis: Any, values: dict[str, float], best: str, form: str, limit: float) -> None:
    colours = [_BEST if name == best else _REST for name in values]
    axis.barh(list(values), [min(v, limit) for v in values.values()], color=colours, height=0.7)
    # From the top down; one bar alone is as thick as one of three.
    axis.set_ylim(max(len(values), 3) - 0.5, -0.5)
    for i, value in enumerate(values.values()):
        # An arrow says that the bar goes on beyond what is drawn.
        text = f" {form.format(value)}" + (" →" if value > limit else "")
        axis.text(min(value, limit), i, text, va="center", fontsize=8, color=_INK)
    axis.set_xlim(0, 1.22 * limit)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(labelsize=8, colors=_INK)


def _draw_curve(axis: Any, curve: dict[str, Any]) -> None:
    losses = curve["losses"]
    axis.plot(losses["Transformers"], color=_REST, linewidth=3, label="Transformers")
    axis.plot(losses["opslot"], color=_BEST, linewidth=1, label="opslot")
    axis.set_title(
        f"loss, {curve['steps']} steps: at most {curve['apart']['largest']:.4f} apart\n"
        f"(rounding alone: {curve['rounding']['largest']:.4f})",
        fontsize=9,
        loc="left",
        color=_INK,
    )
    axis.legend(frameon=False, fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(labelsize=8, colors=_INK)
