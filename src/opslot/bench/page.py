"""A benchmark's result as one HTML page that needs nothing but itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from opslot.bench import BenchRow
from opslot.bench.table import bar_limit, eager_of, models, shown_ms, sites

_STYLE = """
:root { color-scheme: light dark; --ink: #1f2933; --faint: #616e7c; --line: #e1e5ea; --page: #fff; --card: #f7f9fb;
  --best: #1f6feb; --rest: #a9b4c2; --floor: #d1242f; --ok: #1a7f37; --bad: #c9252d; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e9ee; --faint: #9aa6b2; --line: #30363d; --page: #0f1419;
  --card: #171d24; --best: #58a6ff; --rest: #566372; --floor: #ff7b72; --ok: #56d364; --bad: #ff7b72; } }
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
.cut { background: linear-gradient(to right, var(--rest) 80%, transparent); }
.best .fill { background: var(--best); } .best td { font-weight: 600; }
.floor { position: absolute; top: -4px; bottom: -4px; border-left: 2px dashed var(--floor); }
.ok { color: var(--ok); } .bad { color: var(--bad); } .red .fill { opacity: .35; }
svg { width: 100%; height: auto; } svg text { fill: var(--faint); font-size: 11px; }
.key { display: inline-block; width: 1.4em; height: 3px; vertical-align: middle; margin-right: .35em; }
"""


def page(
    rows: Sequence[BenchRow],
    steps: Sequence[dict[str, Any]],
    curve: dict[str, Any] | None,
    environment: dict[str, Any],
    command: str,
) -> str:
    """The whole document."""
    parts = [_head(environment, command)]
    if rows:
        parts += [_summary(rows), "<h2>Ops</h2>", _legend(), *_ops(rows)]
    if steps:
        parts += ["<h2>Training step</h2>", *_steps(steps)]
    if curve:
        parts += ["<h2>Loss curve</h2>", _curve(curve)]
    title = f"opslot bench: {escape(environment['device'])}"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head>\n'
        f"<body>{''.join(parts)}</body></html>\n"
    )


def _head(environment: dict[str, Any], command: str) -> str:
    versions = ", ".join(f"{escape(k)} {escape(v)}" for k, v in environment["versions"].items())
    commit = f", commit {escape(environment['commit'])}" if environment["commit"] else ""
    return (
        f"<header><h1>opslot bench</h1><p>{escape(environment['device'])}, {escape(environment['date'])}{commit}, "
        f"Python {escape(environment['python'])}</p><p>{versions}</p><p><code>{escape(command)}</code></p></header>"
    )


def _summary(rows: Sequence[BenchRow]) -> str:
    lines = []
    for (op, variant, case), group in sites(rows).items():
        proven = [r for r in group if r.counts]
        if not proven:
            continue
        best, eager = proven[0], eager_of(group)
        times = f"{eager / best.ms:.2f}x" if eager and best.ms else "-"
        share = f"{best.share:.0%}" if best.share else "-"
        lines.append(
            f'<tr><td class="l">{escape(op)}/{escape(variant)}</td><td class="l">{escape(case)}</td>'
            f'<td class="l"><b>{escape(best.kernel)}</b></td><td>{shown_ms(best)}</td><td>{times}</td>'
            f"<td>{share}</td></tr>"
        )
    header = (
        '<tr><th class="l">op</th><th class="l">case</th><th class="l">fastest proven</th><th>ms</th>'
        "<th>against eager</th><th>of the floor</th></tr>"
    )
    return f'<h2>Who wins where</h2><div class="card"><table>{header}{"".join(lines)}</table></div>'


def _legend() -> str:
    return (
        "<p>Forward plus backward on random data. <b>ms</b> is the device's own time, with the host running ahead; "
        "<b>alone</b> has the host's part, in a loop that does nothing else. "
        '<span class="key" style="background:var(--best)"></span>fastest proven, '
        '<span class="key" style="background:var(--floor)"></span>the floor: bytes over copy bandwidth or FLOPs over '
        "the rate of a large product, both measured here. The check compares forward and every gradient with float64; "
        "a time in parentheses stands beside a failed check and does not count. A bar that fades is longer than its "
        "track.</p>"
    )


def _ops(rows: Sequence[BenchRow]) -> Iterator[str]:
    header = (
        '<tr><th class="l name">implementation</th><th class="bar"></th>'
        + "".join(f'<th class="figure">{name}</th>' for name in ("ms", "alone", "x eager", "of floor", "peak MiB"))
        + '<th class="l">check</th></tr>'
    )
    for (op, variant, case), group in sites(rows).items():
        eager, floor = eager_of(group), group[0].floor_ms
        longest = max(bar_limit([r.ms for r in group if r.ms]), floor or 0.0)
        lines = "".join(_op_line(r, r is group[0] and r.counts, eager, longest) for r in group)
        yield (
            f'<section class="card"><h3>{escape(op)}/{escape(variant)}<small>{escape(case)}, {group[0].dtype}</small>'
            f'</h3><table class="wide">{header}{lines}</table></section>'
        )


def _op_line(row: BenchRow, best: bool, eager: float | None, longest: float) -> str:
    kind = "best" if best else "" if row.counts else "red"
    floor = _mark(row.floor_ms / longest) if row.floor_ms else ""
    verdict = f"&#10003; {escape(row.verdict)}" if row.counts else f"&#10007; {escape(row.verdict)}"
    cells = (
        shown_ms(row),
        f"{row.alone_ms:.3f}" if row.counts and row.alone_ms else "-",
        f"{eager / row.ms:.2f}" if row.counts and eager and row.ms else "-",
        f"{row.share:.0%}" if row.counts and row.share else "-",
        f"{row.peak_mib:,.0f}" if row.peak_mib is not None else "-",
    )
    return (
        f'<tr class="{kind}"><td class="l">{escape(row.kernel)}</td>{_bar((row.ms or 0.0) / longest, floor)}'
        + "".join(f"<td>{cell}</td>" for cell in cells)
        + f'<td class="why {"ok" if row.counts else "bad"}">{verdict}</td></tr>'
    )


def _bar(share: float, mark: str = "") -> str:
    """A bar of at most the whole track; a longer one fades at its end."""
    cut = " cut" if share > 1.0 else ""
    fill = f'<div class="fill{cut}" style="width:{min(share, 1.0):.2%}"></div>'
    return f'<td class="bar"><div class="track">{fill}{mark}</div></td>'


def _mark(share: float) -> str:
    return f'<div class="floor" style="left:{share:.2%}"></div>'


def _steps(steps: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield (
        "<p>Each contender in a process of its own, from the same weights, on the same tokens; the check compares its "
        "first and last loss with Transformers' own code.</p>"
    )
    yield from (_step_card(model, group) for model, group in models(steps).items())


def _step_card(model: str, steps: Sequence[dict[str, Any]]) -> str:
    header = (
        '<tr><th class="l name">contender</th><th class="bar"></th>'
        + "".join(
            f'<th class="figure">{name}</th>' for name in ("tokens/s", "ms", "peak GiB", "first loss", "last loss")
        )
        + '<th class="l">check</th></tr>'
    )
    longest = max((s["tokens_per_s"] for s in steps if "error" not in s), default=1.0)
    fastest = max((s["tokens_per_s"] for s in steps if s.get("check") == "ok"), default=0.0)
    lines = "".join(_step_line(s, longest, fastest) for s in steps)
    return f'<section class="card"><h3>{escape(model)}</h3><table class="wide">{header}{lines}</table></section>'


def _step_line(step: dict[str, Any], longest: float, fastest: float) -> str:
    name = f'<td class="l">{escape(step["contender"])}</td>'
    if "error" in step:
        why = f"&#10007; failed: {escape(step['error'])}"
        return f'<tr class="red">{name}<td colspan="7" class="why bad">{why}</td></tr>'
    good, speed = step["check"] == "ok", step["tokens_per_s"]
    kind = "red" if not good else "best" if speed == fastest else ""
    verdict = f"{'&#10003;' if good else '&#10007;'} {escape(step['check'])}"
    peak = f"{step['peak_gib']:.1f}" if step["peak_gib"] is not None else "-"
    cells = f"{speed:,.0f}", f"{step['ms']:.1f}", peak, f"{step['first_loss']:.4f}", f"{step['last_loss']:.4f}"
    return (
        f'<tr class="{kind}">{name}{_bar(speed / longest)}{"".join(f"<td>{c}</td>" for c in cells)}'
        f'<td class="why {"ok" if good else "bad"}">{verdict}</td></tr>'
    )


def _curve(curve: dict[str, Any]) -> str:
    width, height, left, bottom = 1000, 320, 46, 24
    losses = curve["losses"]
    values = [*losses["Transformers"], *losses["opslot"]]
    low, high = min(values), max(values)
    span = (high - low) or 1.0

    def points(series: Sequence[float]) -> str:
        step = (width - left - 8) / max(1, len(series) - 1)
        return " ".join(
            f"{left + i * step:.1f},{8 + (high - v) / span * (height - bottom - 8):.1f}" for i, v in enumerate(series)
        )

    ticks = "".join(
        f'<text x="0" y="{12 + (high - v) / span * (height - bottom - 8):.0f}">{v:.2f}</text>'
        for v in (low, (low + high) / 2, high)
    )
    apart, rounding = curve["apart"], curve["rounding"]
    return (
        f"<p>{curve['steps']} steps of {curve['batch'][0]} x {curve['batch'][1]} tokens of Python's standard library, "
        "from the same weights. "
        '<span class="key" style="background:var(--rest)"></span>Transformers, '
        '<span class="key" style="background:var(--best)"></span>opslot: at most '
        f"<b>{apart['largest']:.4f}</b> nats apart, {apart['mean']:.4f} on average. Transformers and itself, with the "
        f"rows of every batch in reverse: {rounding['largest']:.4f}, {rounding['mean']:.4f}.</p>"
        f'<div class="card"><svg viewBox="0 0 {width} {height}" role="img" aria-label="loss by step">{ticks}'
        f'<text x="{left}" y="{height - 4}">step 1</text>'
        f'<text x="{width - 8}" y="{height - 4}" text-anchor="end">step {curve["steps"]}</text>'
        f'<polyline fill="none" stroke="var(--rest)" stroke-width="4" points="{points(losses["Transformers"])}"/>'
        f'<polyline fill="none" stroke="var(--best)" stroke-width="1.5" points="{points(losses["opslot"])}"/>'
        "</svg></div>"
    )
