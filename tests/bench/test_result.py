import dataclasses
import json
import re

import pytest

from opslot._base.errors import ConfigError
from opslot.bench.page import page
from opslot.bench.plots import axis_limit, draw
from opslot.bench.result import (
    Distance,
    Environment,
    LossCurve,
    OpRow,
    Result,
    Run,
    StepRow,
    Value,
    by_comparison,
    from_json,
    merge,
    origin_of,
    read,
    to_json,
)
from opslot.bench.step import check_losses
from opslot.bench.table import ops_table
from opslot.cli import main

OPS = [
    OpRow("rms_norm", "standard", "8x8", "eager", "float32", 2.0, 2.5, 0.5, 3.0, "ok"),
    OpRow("rms_norm", "standard", "8x8", "triton", "float32", 1.0, 1.5, 0.5, 3.0, "ok", {"width": 8}, 8),
    OpRow("rms_norm", "standard", "8x8", "cheat", "float32", 0.5, 0.6, 0.5, 3.0, "WRONG out <error> 1.0e+00"),
    OpRow("rms_norm", "standard", "8x8", "liger: x", "float32", check="RuntimeError: no & device"),
]
STEPS = check_losses(
    [
        StepRow("tiny", "opslot", 2, 16, "", 1, 1.0, 1e3, 1.5, 3.0, 2.0),
        StepRow("tiny", "Transformers", 2, 16, "", 1, 2.0, 5e2, None, 3.0, 2.0),
        StepRow("tiny", "Liger-Kernel", 2, 16, error="ImportError: <none>"),
    ]
)
CURVE = LossCurve(
    4,
    2,
    16,
    3e-4,
    {"Transformers": [4.0, 3.0, 2.5, 2.0], "opslot": [4.0, 3.1, 2.5, 2.0], "rounding": [4.0, 3.0, 2.5, 2.0]},
    Distance(0.1, 0.025, 0.0),
    Distance(0.0, 0.0, 0.0),
)
MACHINE = Environment("NVIDIA <H200>", "x86", 2, "3.12", {"torch": "2.11"}, "abc1234", "2026-11-20")
RUN = Run("opslot bench --html x", MACHINE, ["hf"], OPS, STEPS, CURVE, [Value("import", 0.1, "s", "<= 0.15")])
RESULT = Result("opslot bench", [RUN])


def test_result_survives_json():
    assert from_json(to_json(RESULT)) == RESULT


def test_table_sorts_valid_rows_by_time_and_failed_ones_last():
    (group,) = by_comparison(OPS).values()
    assert [r.kernel for r in group] == ["triton", "eager", "cheat", "liger: x"]
    header, _, *lines = ops_table(OPS).splitlines()
    assert re.search(r"time \(ms\) +wall \(ms\) +vs eager +% of roofline +peak MiB +check", header)
    assert re.search(r"triton +1\.000 +1\.500 +2\.00x +50% +3 +ok", lines[0])
    assert re.search(r"cheat +\(0\.500\) +- +- +- +3 +WRONG out <error>", lines[2])


def test_page_is_complete_and_self_contained():
    text = page(RESULT)
    for needed in (
        "NVIDIA &lt;H200&gt;",
        "abc1234",
        "torch 2.11",
        "opslot bench --html x",
        "WRONG out &lt;error&gt; 1.0e+00",
        "RuntimeError: no &amp; device",
        "ImportError: &lt;none&gt;",
        "0.1000",
        *(r.kernel for r in OPS),
        *(s.implementation for s in STEPS),
    ):
        assert needed in text, needed
    assert not re.search(r"https?:|//|<script|<link|<img|@import|url\(|src=", text), "nothing from elsewhere"
    assert "prefers-color-scheme: dark" in text
    best = re.findall(r'<tr class="best[^"]*"><td class="l">([^<]*)', text)
    assert best == ["triton", "opslot"], "nothing that failed its check is the fastest"


def test_color_marks_opslot_not_the_fastest():
    rows = [dataclasses.replace(OPS[1], kernel="torch.compile", ms=0.5), *OPS[:2]]
    text = page(Result("opslot bench", [dataclasses.replace(RUN, ops=rows)]))
    own = re.findall(r'<tr class="[^"]*\bown\b[^"]*"><td class="l">([^<]*)', text)
    assert own == ["triton", "opslot"]
    origins = {
        "torch.compile": "torch.compile",
        "fused_quack": "opslot",
        "quack": "quack",
        "liger: in place": "Liger-Kernel",
    }
    assert {kernel: origin_of(kernel) for kernel in origins} == origins
    assert dataclasses.replace(OPS[1], package="acme").origin == "acme"


def test_outlier_bar_is_broken():
    assert axis_limit([0.18, 0.2, 0.3, 2.7]) == pytest.approx(0.375)
    assert axis_limit([139.0, 1.4, 125.0, 2.0]) == 2.5
    assert axis_limit([1.0, 2.0, 3.0]) == 3.0
    assert axis_limit([1.0, 9.0]) == 9.0
    assert axis_limit([]) == 1.0


def bars_of(axis):
    return {label.get_text(): bar for label, bar in zip(axis.get_yticklabels(), axis.patches, strict=False)}


def test_plot_colors_opslot_and_marks_broken_bars(tmp_path, monkeypatch):
    from matplotlib.colors import to_hex
    from matplotlib.figure import Figure

    figures = []
    saved = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **kw: (figures.append(self), saved(self, *args, **kw)))
    case = ("swiglu_mlp", "standard", "4x4")
    times = {"torch.compile": 0.9, "triton": 1.0, "liger: in place": 1.1, "eager": 20.0}
    ops = [OpRow(*case, kernel, "float32", ms, check="ok") for kernel, ms in times.items()]
    run = dataclasses.replace(RUN, ops=ops, curve=None)
    draw(Result("opslot bench", [run]), tmp_path / "ops.png", {"Source": "abc"})
    assert (tmp_path / "ops.png").read_bytes().startswith(b"\x89PNG")
    first, second, *_ = figures[0].axes
    for axis, own in ((first, "triton"), (second, "opslot")):
        colors = {name: to_hex(bar.get_facecolor()) for name, bar in bars_of(axis).items()}
        colored = [name for name, color in colors.items() if len({color[i : i + 2] for i in (1, 3, 5)}) > 1]
        blue = [name for name in colored if int(colors[name][5:], 16) - int(colors[name][1:3], 16) > 64]
        assert blue == [own]
    assert bars_of(first)["eager"].get_width() == pytest.approx(1.375)
    assert "20.0" in [text.get_text() for text in first.texts], "a broken bar has its number"
    assert len(first.lines) == 2, "and two break marks"
    assert not second.lines


def test_empty_result_makes_no_plot(tmp_path):
    draw(Result("opslot bench", [Run("", MACHINE)]), tmp_path / "page.png")
    assert not list(tmp_path.iterdir())
    draw(Result("opslot bench", [Run("", MACHINE, curve=CURVE)]), tmp_path / "page.png")
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")


def test_merge_replaces_whole_comparisons(tmp_path, capsys):
    slow = dataclasses.replace(OPS[1], ms=9.0)
    other = dataclasses.replace(OPS[0], case="16x16")
    old = Run("old", MACHINE, ops=[OPS[0], slow, other], steps=STEPS)
    new = Run("new", dataclasses.replace(MACHINE, commit="def5678"), ops=OPS[1:], curve=CURVE)
    files = [tmp_path / "old.json", tmp_path / "new.json"]
    for file, run in zip(files, (old, new), strict=True):
        file.write_text(to_json(Result("opslot bench", [run])))
    page_file, out = tmp_path / "page.html", tmp_path / "all.json"
    assert main(["bench", "--merge", *map(str, files), "--html", str(page_file), "--output", str(out)]) == 0
    assert capsys.readouterr().out == f"merged 2 files with 2 runs into {out}\n", "not its tables"
    assert main(["bench", "--merge", *map(str, files)]) == 0
    assert "triton" in capsys.readouterr().out
    merged = read(out)
    assert merged.runs == [dataclasses.replace(old, ops=[other]), new], "rows of two runs are never compared"
    assert merged.curve == CURVE
    assert "Loss curve" in page_file.read_text()
    assert merged.run_of(merged.ops[-1]) is merged.runs[1]


def test_merge_of_different_devices_raises():
    other = Result("opslot bench", [Run("", dataclasses.replace(MACHINE, device="CPU"), ops=OPS)])
    with pytest.raises(ConfigError, match="different devices\n  found: CPU, NVIDIA <H200>"):
        merge([RESULT, other])


def test_merge_keeps_the_script_and_raises_for_different_ones():
    lora = Result("benchmarks/lora.py", RESULT.runs)
    assert merge([lora, lora]).script == lora.script
    with pytest.raises(ConfigError, match="different scripts"):
        merge([RESULT, lora])


@pytest.mark.parametrize("text", ['{"rows": []}', "[" * 100_000, "[]", "{", '{"schema": 2, "script": "opslot bench"}'])
def test_merge_of_other_files_raises(tmp_path, capsys, text):
    file = tmp_path / "x.json"
    file.write_text(text)
    assert main(["bench", "--merge", str(file)]) == 2
    assert "is not a benchmark result" in capsys.readouterr().err


def test_merge_of_unreadable_files_raises(tmp_path, capsys):
    for file, found in ((tmp_path / "gone.json", "No such file or directory"), (tmp_path, "Is a directory")):
        assert main(["bench", "--merge", str(file)]) == 2
        assert capsys.readouterr().err.startswith(f"opslot: error: {str(file)!r} cannot be read\n  found: {found}")


def _change(**fields):
    return {"runs": [json.loads(to_json(RESULT))["runs"][0] | fields]}


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (_change(ops=[1]), "result.runs[0].ops[0] is int, not an object"),
        (_change(ops=[{"op": "rms_norm"}]), "result.runs[0].ops[0] lacks variant, case, kernel, dtype"),
        (_change(ops={"a": 1}), "result.runs[0].ops is {'a': 1}"),
        (_change(ops=[{**vars(OPS[0]), "ms": "fast"}]), "ops[0].ms is 'fast', not a valid float"),
        (_change(ops=[{**vars(OPS[0]), "ms": float("nan")}]), "ops[0].ms is nan"),
        (_change(ops=[{**vars(OPS[0]), "speed": 1.0}]), "ops[0] has unknown fields: speed"),
        (_change(steps=[{}]), "result.runs[0].steps[0] lacks model"),
        (_change(steps=4), "result.runs[0].steps is 4"),
        (_change(curve={"steps": 1}), "result.runs[0].curve lacks batch"),
        (_change(environment={"device": ["CPU"]}), "result.runs[0].environment lacks cpu"),
        (_change(environment={**vars(MACHINE), "versions": None}), "environment.versions is None"),
        ({"runs": None}, "result.runs is None"),
        ({"tables": []}, "result has unknown fields: tables"),
    ],
)
def test_invalid_result_names_file_and_field(tmp_path, capsys, change, found):
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(to_json(RESULT))
    bad.write_text(json.dumps(json.loads(to_json(RESULT)) | change))
    assert main(["bench", "--merge", str(good), str(bad), "--html", str(tmp_path / "page.html")]) == 2
    err = capsys.readouterr().err
    assert f"{str(bad)!r} is not a benchmark result\n  found: " in err
    assert found in err
    assert not (tmp_path / "page.html").exists()
