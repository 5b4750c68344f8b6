"""Plot of the loss curve."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from opslot._base.files import replacing

_INK = "#1f2933"
_FAINT = "#9aa5b1"
_LOSS = "#2563eb"
_EVALUATION = "#d9480f"


def draw_loss_curve(records: Sequence[dict[str, Any]], path: Path, title: str, reference: float | None = None) -> None:
    """Draw the losses of metrics.jsonl, raw and smoothed, with the evaluation losses.

    Args:
        records: lines of metrics.jsonl, each with "step", "loss" and optionally "eval_loss", in nats per token.
        path: PNG file to write, atomically.
        reference: unigram entropy of the text in nats per token: the loss of a model that predicts token frequencies
            without any context.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps = np.array([record["step"] for record in records])
    losses = np.array([record["loss"] for record in records], dtype=float)
    figure = Figure(figsize=(8, 4.6), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    many = len(records) > 20
    raw = {"linewidth": 0.8, "alpha": 0.35} if many else {"linewidth": 1.2, "marker": "o", "markersize": 3}
    axes.plot(steps, losses, color=_LOSS, label="each step" if many else "loss", **raw)
    smoothed = smooth(losses)
    if many:
        axes.plot(steps, smoothed, color=_LOSS, linewidth=2, label="smoothed")
    evaluated = [(record["step"], record["eval_loss"]) for record in records if "eval_loss" in record]
    if evaluated:
        axes.plot(
            *zip(*evaluated, strict=True),
            color=_EVALUATION,
            marker="o",
            markersize=4,
            linewidth=1.2,
            label=f"evaluation ({evaluated[-1][1]:.3f})",
        )
    if reference is not None:
        axes.axhline(
            reference,
            color=_FAINT,
            linewidth=1.2,
            linestyle=(0, (5, 3)),
            label=f"unigram entropy of the text ({reference:.2f})",
        )
    axes.annotate(
        f"{smoothed[-1]:.3f}",
        (steps[-1], smoothed[-1]),
        xytext=(6, 0),
        textcoords="offset points",
        va="center",
        color=_LOSS,
        fontweight="bold",
    )
    _style(axes, title)
    with replacing(path) as beside:
        figure.savefig(beside)


def smooth(values: np.ndarray) -> np.ndarray:
    """Moving average over about a twentieth of the curve, ignoring values that are not finite.

    The window is centered, so that it does not lag. It shrinks at the start, where losses fall fast, and keeps its left
    half at the end, so that the last value is also an average.
    """
    count = len(values)
    index = np.arange(count)
    left = np.minimum(index, count // 40)
    right = np.minimum(left, count - 1 - index)
    finite = np.isfinite(values)
    totals = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    first, last = index - left, index + right + 1
    with np.errstate(invalid="ignore"):
        return (totals[last] - totals[first]) / (counts[last] - counts[first])


def _style(axes: Any, title: str) -> None:
    axes.set_title(title, loc="left", color=_INK, fontsize=11, fontweight="bold")
    axes.set_xlabel("step", color=_INK)
    axes.set_ylabel("cross entropy (nats per token)", color=_INK)
    axes.tick_params(colors=_INK)
    axes.grid(axis="y", color=_FAINT, alpha=0.25, linewidth=0.6)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.margins(x=0.02)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(_FAINT)
    axes.legend(loc="upper right", frameon=False, labelcolor=_INK)
