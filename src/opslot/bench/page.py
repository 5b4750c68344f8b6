"""A benchmark's result as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from opslot.bench.plots import axis_limit
from opslot.bench.result import (
    LossCurve,
    OpRow,
    Result,
    StepRow,
    by_comparison,
    eager_ms,
    steps_by_comparison,
)
from opslot.bench.table import OP_COLUMNS, STEP_COLUMNS, op_cells, step_cells, step_check, time_cell

_STYLE = """
:root { color-scheme: light dark; --ink: #1f2933; --faint: #616e7c; --line: #e1e5ea; --page: #fff; --card: #f7f9fb;
  --own: #1f6feb; --rest: #a9b4c2; --roofline: #d1242f; --ok: #1a7f37; --bad: #c9252d; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e9ee; --faint: #9aa6b2; --line: #30363d; --page: #0f1419;
  --card: #171d24; --own: #58a6ff; --rest: #566372; --roofline: #ff7b72; --ok: #56d364; --bad: #ff7b72; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1080px; padding: 2rem 1.25rem 4rem; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; } h2 { font-size: 1.15rem; margin: 2.5rem 0 .75rem; }
h3 { font-size: .95rem; margin: 0 0 .5rem; } h3 small { color: var(--faint); font-weight: normal; margin-left: .5rem; }
p { margin: .25rem 0; color: var(--faint); max-width: 75ch; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: .9rem 1rem;
  margin-bottom: .9rem; overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: .85rem; }
th { text-align: right; font-weight: 500; color: var(--faint); } th.l, td.l { text-align: left; }
th, td { padding: .2rem .5rem; white-space: nowrap; text-align: right; border-bottom: 1px solid var(--line); }
tr:last-child td { border-bottom: 0; } td.why { white-space: normal; text-align: left; }
.wide { table-layout: fixed; min-width: 860px; } .name { width: 9.5rem; } .bar { width: 24%; }
.figure { width: 4.6rem; } td.l { overflow: hidden; text-overflow: ellipsis; }
.track { position: relative; height: 14px; }
.fill { position: absolute; inset: 0 auto 0 0; background: var(--rest); border-radius: 2px; }
.cut::after { content: ""; position: absolute; right: 14%; top: -3px; bottom: -3px; width: 5px;
  background: var(--card); border: solid var(--ink); border-width: 0 1px; transform: skewX(-20deg); }
.own .fill { background: var(--own); } .best td { font-weight: 600; }
.roofline { position: absolute; top: -4px; bottom: -4px; border-left: 2px dashed var(--roofline); }
.ok { color: var(--ok); } .bad { color: var(--bad); } .red .fill { opacity: .35; }
svg { width: 100%; height: auto; } svg text { fill: var(--faint); font-size: 11px; }
.key { display: inline-block; width: 1.4em; height: 3px; vertical-align: middle; margin-right: .35em; }
"""


def page(result: Result) -> str:
    """The whole document."""
    parts = ["<header><h1>opslot bench</h1>", *_runs(result), "</header>"]
    if result.ops:
        parts += [_summary(result.ops), "<h2>Ops</h2>", _legend(), *_ops(result.ops)]
    if result.steps:
        parts += ["<h2>Training step</h2>", *_steps(result.steps)]
    if result.curve:
        parts += ["<h2>Loss curve</h2>", _curve(result.curve)]
    devices = dict.fromkeys(run.environment.device for run in result.runs)
    title = f"opslot bench: {escape(', '.join(devices))}"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head>\n'
        f"<body>{''.join(parts)}</body></html>\n"
    )


def _runs(result: Result) -> Iterator[str]:
    for run in result.runs:
        here = run.environment
        versions = ", ".join(f"{escape(k)} {escape(v)}" for k, v in here.versions.items())
        commit = f", commit {escape(here.commit)}" if here.commit else ""
        yield (
            f"<p>{escape(here.device)}, {escape(here.date)}{commit}, Python {escape(here.python)}, {versions}</p>"
            f"<p><code>{escape(run.command)}</code></p>"
        )


def _summary(rows: Sequence[OpRow]) -> str:
    lines = []
    for (op, variant, case), group in by_comparison(rows).items():
        if not group[0].valid:
            continue
        best = group[0]
        _, _, against, share, _ = op_cells(best, eager_ms(group))
        lines.append(
            f'<tr><td class="l">{escape(op)}/{escape(variant)}</td><td class="l">{escape(case)}</td>'
            f'<td class="l"><b>{escape(best.kernel)}</b></td><td class="l">{escape(best.origin)}</td>'
            f"<td>{time_cell(best)}</td><td>{against}</td><td>{share}</td></tr>"
        )
    header = "".join(f'<th class="l">{name}</th>' for name in ("op", "case", "fastest kernel", "from"))
    header += "".join(f"<th>{name}</th>" for name in (OP_COLUMNS[0], *OP_COLUMNS[2:4]))
    return f'<h2>Fastest kernels</h2><div class="card"><table><tr>{header}</tr>{"".join(lines)}</table></div>'


def _legend() -> str:
    return (
        "<p>Forward plus backward on random data. <b>time</b> is the device's, with the host running ahead; "
        "<b>wall</b> includes the host, in a loop that does nothing else. "
        '<span class="key" style="background:var(--own)"></span>opslot\'s own kernels; bold: the fastest with a passed '
        'check; <span class="key" style="background:var(--roofline)"></span>the roofline: bytes over peak bandwidth or '
        "FLOPs over the FLOP/s of a large GEMM, both measured here. The check compares forward and every gradient with "
        "float64; a time in parentheses is beside a failed check and does not count. A bar with a break is longer than "
        "it is drawn.</p>"
    )


def _ops(rows: Sequence[OpRow]) -> Iterator[str]:
    header = _header("implementation", OP_COLUMNS)
    for (op, variant, case), group in by_comparison(rows).items():
        eager, roofline = eager_ms(group), group[0].roofline_ms
        longest = max(axis_limit([r.ms for r in group if r.ms]), roofline or 0.0)
        lines = "".join(_op_line(r, r is group[0] and r.valid, eager, longest) for r in group)
        yield (
            f'<section class="card"><h3>{escape(op)}/{escape(variant)}<small>{escape(case)}, {group[0].dtype}</small>'
            f'</h3><table class="wide">{header}{lines}</table></section>'
        )


def _header(first: str, columns: Sequence[str]) -> str:
    figures = "".join(f'<th class="figure">{name}</th>' for name in columns)
    return f'<tr><th class="l name">{first}</th><th class="bar"></th>{figures}<th class="l">check</th></tr>'


def _op_line(row: OpRow, best: bool, eager: float | None, longest: float) -> str:
    roofline = f'<div class="roofline" style="left:{row.roofline_ms / longest:.2%}"></div>' if row.roofline_ms else ""
    return _line(
        row.kernel,
        _bar((row.ms or 0.0) / longest, roofline),
        op_cells(row, eager),
        row.check,
        good=row.valid,
        own=row.origin == "opslot",
        best=best,
    )


def _line(name: str, bar: str, cells: Sequence[str], check: str, *, good: bool, own: bool, best: bool) -> str:
    kinds = [kind for kind, holds in (("best", best), ("own", own), ("red", not good)) if holds]
    mark = "&#10003;" if good else "&#10007;"
    return (
        f'<tr class="{" ".join(kinds)}"><td class="l">{escape(name)}</td>{bar}'
        + "".join(f"<td>{cell}</td>" for cell in cells)
        + f'<td class="why {"ok" if good else "bad"}">{mark} {escape(check)}</td></tr>'
    )


def _bar(share: float, mark: str = "") -> str:
    """A bar of at most the whole track; a longer one has a break."""
    cut = " cut" if share > 1.0 else ""
    fill = f'<div class="fill{cut}" style="width:{min(share, 1.0):.2%}"></div>'
    return f'<td class="bar"><div class="track">{fill}{mark}</div></td>'


def _steps(steps: Sequence[StepRow]) -> Iterator[str]:
    yield (
        "<p>Each implementation runs in a separate process, from the same weights, on the same tokens; the check "
        "compares its first and last loss with those of Transformers' own code.</p>"
    )
    yield from (_step_card(name, group) for name, group in steps_by_comparison(steps).items())


def _step_card(name: str, steps: Sequence[StepRow]) -> str:
    longest = max((s.tokens_per_s or 0.0 for s in steps), default=0.0) or 1.0
    fastest = max((s.tokens_per_s or 0.0 for s in steps if s.valid), default=0.0)
    lines = "".join(
        _line(
            s.implementation,
            _bar((s.tokens_per_s or 0.0) / longest),
            step_cells(s),
            step_check(s),
            good=s.valid,
            own=s.own,
            best=s.valid and s.tokens_per_s == fastest,
        )
        for s in steps
    )
    header = _header("implementation", STEP_COLUMNS)
    return f'<section class="card"><h3>{escape(name)}</h3><table class="wide">{header}{lines}</table></section>'


def _curve(curve: LossCurve) -> str:
    width, height, left, bottom = 1000, 320, 46, 24
    losses = curve.losses
    values = [*losses["Transformers"], *losses["opslot"]]
    low, high = min(values), max(values)
    span = (high - low) or 1.0

    def y(value: float) -> float:
        return 8 + (high - value) / span * (height - bottom - 8)

    def line(series: Sequence[float], color: str, stroke: float) -> str:
        step = (width - left - 8) / max(1, len(series) - 1)
        points = " ".join(f"{left + i * step:.1f},{y(v):.1f}" for i, v in enumerate(series))
        return f'<polyline fill="none" stroke="var(--{color})" stroke-width="{stroke}" points="{points}"/>'

    ticks = "".join(f'<text x="0" y="{4 + y(v):.0f}">{v:.2f}</text>' for v in (low, (low + high) / 2, high))
    return (
        f"<p>{curve.steps} steps of {curve.batch} x {curve.length} tokens of Python's standard library, from the same "
        'weights. <span class="key" style="background:var(--rest)"></span>Transformers, '
        '<span class="key" style="background:var(--own)"></span>opslot: at most '
        f"<b>{curve.distance.largest:.4f}</b> nats per token apart, {curve.distance.mean:.4f} on average. Transformers "
        f"from itself, with the samples of every batch reversed: {curve.rounding.largest:.4f}, "
        f"{curve.rounding.mean:.4f}.</p>"
        f'<div class="card"><svg viewBox="0 0 {width} {height}" role="img" aria-label="loss by step">{ticks}'
        f'<text x="{left}" y="{height - 4}">step 1</text>'
        f'<text x="{width - 8}" y="{height - 4}" text-anchor="end">step {curve.steps}</text>'
        f"{line(losses['Transformers'], 'rest', 4)}{line(losses['opslot'], 'own', 1.5)}</svg></div>"
    )
