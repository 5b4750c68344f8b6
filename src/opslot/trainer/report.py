"""`opslot report`: one HTML page about a run, from its metrics.jsonl, config.yaml, kernels.json and samples.jsonl."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.ticker import MaxNLocator

from opslot._base.errors import ConfigError
from opslot._base.files import read_json_object, write_text
from opslot.trainer.callbacks.writers import METRICS_FILE, SAMPLES_FILE, read_lines, read_metrics

REPORT_FILE = "report.html"
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 560, 220, 64, 26, 10
_MOST_POINTS = 600

_STYLE = """
:root { --ink: #1f2933; --faint: #64707d; --line: #e3e8ee; --card: #fff; --page: #f6f8fa; --one: #2563eb;
  --two: #d9480f; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --faint: #9aa5b1; --line: #30363d; --card: #161b22;
  --page: #0d1117; --one: #6ea8fe; --two: #ff922b; } }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); margin: 0 auto;
  max-width: 1240px; padding: 24px; }
h1 { font-size: 24px; margin: 0; } h2 { font-size: 18px; margin: 32px 0 8px; }
p { color: var(--faint); margin: 4px 0 16px; overflow-wrap: anywhere; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(130px, 1fr)); gap: 12px; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(480px, 100%), 1fr)); gap: 12px; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 12px 16px;
  overflow-x: auto; }
.card small { color: var(--faint); display: block; } .card b { font-size: 20px; font-variant-numeric: tabular-nums; }
.plots h3 { font-size: 14px; margin: 0 0 6px; } h3 small { font-weight: 400; } h3 .key:first-child { margin-left: 0; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; padding: 6px 14px 6px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--faint); font-weight: 500; }
td.keep { white-space: nowrap; }
svg { width: 100%; height: auto; display: block; } svg text { fill: var(--faint); font-size: 11px; }
pre { margin: 0; font-size: 13px; white-space: pre-wrap; overflow-wrap: anywhere; }
.key { display: inline-block; width: 14px; height: 3px; vertical-align: middle; margin: 0 6px 0 12px; }
details summary { cursor: pointer; color: var(--faint); padding: 4px 0; }
"""


class _Series(NamedTuple):
    """A line of a plot: the name of a metric, how it is called, and its color."""

    metric: str
    label: str
    color: str = "one"
    scale: float = 1.0


class _Plot(NamedTuple):
    title: str
    series: tuple[_Series, ...]
    unit: str = ""
    from_zero: bool = True


_PLOTS = (
    _Plot(
        "Loss (nats per token)",
        (_Series("loss", "training"), _Series("eval_loss", "evaluation", "two")),
        from_zero=False,
    ),
    _Plot("Learning rate", (_Series("lr", "lr"),)),
    _Plot("Gradient norm", (_Series("grad_norm", "before clipping"),)),
    _Plot("Throughput (tokens/s)", (_Series("tokens_per_s", "all processes"),)),
    _Plot("MFU", (_Series("mfu", "MFU", scale=100),), "%"),
    _Plot("Model TFLOP/s per process", (_Series("tflops_per_gpu", "TFLOP/s"),)),
    _Plot("Peak memory (GiB)", (_Series("memory_gib", "GiB"),)),
    _Plot("Time waiting for data", (_Series("data_wait", "share of the step", scale=100),), "%"),
    _Plot("Auxiliary loss", (_Series("aux_loss", "training"),), from_zero=False),
    _Plot("Accuracy", (_Series("eval_accuracy", "evaluation", "two"),)),
    _Plot("F1", (_Series("eval_f1", "evaluation", "two"),)),
)


def write_report(run: Path, output: Path | None = None) -> Path:
    """Write the page of the run in folder `run`; returns its path, by default <run>/report.html.

    Raises:
        ConfigError: `run` is not a folder with a metrics.jsonl that has a step; the page cannot be written.
    """
    if not run.is_dir():
        raise ConfigError(f"no such folder: {run}", hint="give the train.output_dir of a run")
    records = read_metrics(run)
    if not records:
        raise ConfigError(
            f"{run} has no metrics",
            found=f"{METRICS_FILE} has no step" if (run / METRICS_FILE).is_file() else f"no {METRICS_FILE}",
            hint="give the train.output_dir of a run that has trained a step",
        )
    target = output or run / REPORT_FILE
    try:
        write_text(target, page(run, records))
    except OSError as error:
        raise ConfigError(
            f"{target} cannot be written", found=str(error.strerror), hint="name another file with --output"
        ) from error
    return target


def page(run: Path, records: Sequence[Mapping[str, Any]]) -> str:
    """The whole document."""
    kernels = read_json_object(run / "kernels.json")
    samples = [line for line in read_lines(run / SAMPLES_FILE) if {"prompt", "answer"} <= line.keys()]
    parts = [f"<header><h1>{escape(run.resolve().name)}</h1>", f"<p>{escape(str(run.resolve()))}</p></header>"]
    parts += ['<div class="cards">', *_figures(records), '</div><h2>Training</h2><div class="plots">']
    parts += [*(_plot(plot, records) for plot in _PLOTS), "</div>"]
    if kernels:
        parts += _kernels(kernels)
    if samples:
        parts += _samples(samples)
    settings = run / "config.yaml"
    if settings.is_file():
        text = escape(settings.read_text(encoding="utf-8", errors="replace"))
        parts.append(f'<h2>Settings</h2><div class="card"><pre>{text}</pre></div>')
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(run.resolve().name)}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head>\n'
        f"<body>{''.join(parts)}</body></html>\n"
    )


def _figures(records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The run in a few numbers; throughput is the median, which the first steps do not change."""
    last = records[-1]
    evaluations = [value for r in records if (value := _number(r, "eval_loss")) is not None]
    total, each = _median(records, "tokens_per_s"), _median(records, "tokens_per_s_per_gpu")
    mfu, memory = _median(records, "mfu"), _number(last, "memory_gib")
    values = {
        "steps": f"{last['step']:,}",
        "tokens": _short(_number(last, "tokens")),
        "last loss": _short(_number(last, "loss")),
        "best evaluation loss": _short(min(evaluations, default=None)),
        "tokens/s (median)": _short(total),
        "tokens/s per process": _short(each) if each != total else None,
        "MFU (median)": None if mfu is None else f"{mfu:.1%}",
        "peak memory": None if memory is None else f"{memory:.1f} GiB",
    }
    for name, shown in values.items():
        if shown is not None:
            yield f'<div class="card"><small>{name}</small><b>{shown}</b></div>'


def _plot(plot: _Plot, records: Sequence[Mapping[str, Any]]) -> str:
    """One curve as SVG; "" without values."""
    lines = []
    for series in plot.series:
        points = [(r["step"], v * series.scale) for r in records if (v := _number(r, series.metric)) is not None]
        if points:
            lines.append((series, points))
    if not lines:
        return ""
    every = [point for _, points in lines for point in points]
    ticks = _ticks([value for _, value in every], plot.from_zero)
    low, high = ticks[0], ticks[-1]
    first, last = min(step for step, _ in every), max(step for step, _ in every)

    def x(step: float) -> float:
        return _LEFT + (step - first) / ((last - first) or 1) * (_WIDTH - _LEFT - 12)

    def y(value: float) -> float:
        return _TOP + (high - value) / (high - low) * (_HEIGHT - _BOTTOM - _TOP)

    drawn = [
        f'<line x1="{_LEFT}" x2="{_WIDTH - 12}" y1="{y(tick):.1f}" y2="{y(tick):.1f}" stroke="var(--line)"/>'
        f'<text x="{_LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{_short(tick)}{plot.unit}</text>'
        for tick in ticks
    ]
    drawn.append(f'<text x="{_LEFT}" y="{_HEIGHT - 6}">step {first:,}</text>')
    drawn.append(f'<text x="{_WIDTH - 12}" y="{_HEIGHT - 6}" text-anchor="end">step {last:,}</text>')
    for series, points in lines:
        drawn += _curve(series, points, x, y)
    keys = "".join(
        f'<span class="key" style="background:var(--{s.color})"></span>{s.label} {_short(points[-1][1])}{plot.unit}'
        for s, points in lines
    )
    return (
        f'<div class="card"><h3>{plot.title}<small>{keys}</small></h3>'
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(plot.title)} by step">'
        f"{''.join(drawn)}</svg></div>"
    )


def _curve(series: _Series, points: Sequence[tuple[int, float]], x: Any, y: Any) -> Iterator[str]:
    """A line with a marker and exact values at each of few points."""
    color = f"var(--{series.color})"
    shown = _thinned(points)
    path = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in shown)
    yield f'<polyline fill="none" stroke="{color}" stroke-width="1.6" points="{path}"/>'
    if len(shown) <= 60:
        for step, value in shown:
            label = f"step {step:,}: {value:.6g}"
            yield (
                f'<circle cx="{x(step):.1f}" cy="{y(value):.1f}" r="2.5" fill="{color}"><title>{label}</title></circle>'
            )


def _thinned(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """At most `_MOST_POINTS` points: the means of equally many neighbors."""
    size = -(-len(points) // _MOST_POINTS)
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [(group[-1][0], sum(value for _, value in group) / len(group)) for group in groups]


def _ticks(values: Sequence[float], from_zero: bool) -> list[float]:
    """Round numbers that enclose the values, in steps of 1, 2 or 5 times a power of ten."""
    low, high = min(values), max(values)
    low = min(low, 0.0) if from_zero else low
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        low, high = low - (abs(low) / 2 or 0.5), high + (abs(high) / 2 or 0.5)
    return [float(tick) for tick in MaxNLocator(4, steps=[1, 2, 5, 10]).tick_values(low, high)]


def _kernels(record: Mapping[str, Any]) -> Iterator[str]:
    where = ", ".join(str(record[name]) for name in ("device", "dtype") if record.get(name))
    yield f"<h2>Kernels</h2><p>{escape(where)}</p>"
    header = "".join(f"<th>{name}</th>" for name in ("op", "kernel", "slot", "modules", "why"))
    rows = []
    for row in record.get("rows", ()):
        cells = (f"{row['op']}/{row['variant']}", " + ".join([row["chosen"], *row.get("wrappers", ())]), row["slot"])
        keep = "".join(f'<td class="keep">{escape(cell)}</td>' for cell in cells)
        rows.append(f"<tr>{keep}<td>{len(row.get('modules', ())) or 1}</td><td>{escape(row['why'])}</td></tr>")
    yield f'<div class="card"><table><tr>{header}</tr>{"".join(rows)}</table></div>'
    rejected = dict.fromkeys(
        (f"{row['op']}/{row['variant']}", name, why)
        for row in record.get("rows", ())
        for name, why in row.get("rejected", ())
    )
    yield from _folded("Kernels that were not selected", ("op", "kernel", "why"), rejected)
    skipped = [(part["symbol"], part["op"], part["reason"]) for part in record.get("skipped", ())]
    yield from _folded("Parts without a slot", ("symbol", "op", "why"), skipped)


def _folded(title: str, header: Sequence[str], rows: Any) -> Iterator[str]:
    lines = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    if lines:
        head = "".join(f"<th>{name}</th>" for name in header)
        yield (
            f"<details><summary>{title}</summary>"
            f'<div class="card"><table><tr>{head}</tr>{lines}</table></div></details>'
        )


def _samples(samples: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    last = samples[-1]["step"]
    yield f"<h2>Samples</h2><p>of the last evaluation, at step {last:,}</p>"
    header = "<th>prompt</th><th>answer</th>"
    for step in sorted({sample["step"] for sample in samples}, reverse=True):
        rows = "".join(
            f"<tr><td><pre>{escape(_prompt(s))}</pre></td><td><pre>{escape(str(s['answer']))}</pre></td></tr>"
            for s in samples
            if s["step"] == step
        )
        table = f'<div class="card"><table><tr>{header}</tr>{rows}</table></div>'
        yield table if step == last else f"<details><summary>step {step:,}</summary>{table}</details>"


def _prompt(sample: Mapping[str, Any]) -> str:
    """The prompt, after the names of its files."""
    media = sample.get("media")
    return "\n".join(map(str, [*(media if isinstance(media, list) else ()), sample["prompt"]]))


def _number(record: Mapping[str, Any], name: str) -> float | None:
    value = record.get(name)
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return value if number else None


def _median(records: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [value for record in records if (value := _number(record, name)) is not None]
    return statistics.median_high(values) if values else None


def _short(value: float | None) -> str | None:
    if value is None:
        return None
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
