import json
import re
import signal

import pytest

from opslot._base.errors import KernelError
from opslot.bench import BenchRow, as_dict
from opslot.bench.page import page
from opslot.bench.plots import draw
from opslot.bench.step_process import main as contend
from opslot.bench.steps import Task, _ended, _judged, _reason, compare_steps, contenders
from opslot.bench.table import bar_limit, ops_table, sites
from opslot.cli import main


def test_tune_measures_a_model_and_auto_follows(folder, tmp_path, capsys, monkeypatch):
    profile = tmp_path / "profile.json"
    monkeypatch.setenv("OPSLOT_PROFILE", str(profile))
    files = {name: tmp_path / f"result.{name}" for name in ("html", "json", "png")}
    options = ["--op", "rms_norm", "--device", "cpu", "--dtype", "float32", "--tokens", "8", "--tune"]
    written = ["--html", str(files["html"]), "--output", str(files["json"]), "--picture", str(files["png"])]
    assert main(["bench", "--model", str(folder), *options, *written]) == 0
    captured = capsys.readouterr()
    assert "rms_norm/standard" in captured.out
    assert f"wrote {profile}" in captured.err
    (machine,) = json.loads(profile.read_text())["machines"]
    found = {t["shape"]["width"]: t for t in machine["timings"] if t["op"] == "rms_norm" and t["variant"] == "standard"}
    assert set(found) == {8, 32}, "norms of heads and of the model"
    assert {"eager", "torch_fused"} <= set(found[32]["ms"])
    result = json.loads(files["json"].read_text())
    assert {r["kernel"] for r in result["rows"]} >= {"eager", "torch_fused"}
    assert files["png"].read_bytes().startswith(b"\x89PNG")

    data = json.loads(profile.read_text())
    for timing in data["machines"][0]["timings"]:
        timing["ms"] = {"eager": 1.0 if timing["shape"].get("width") == 8 else 3.0, "torch_fused": 2.0}
    profile.write_text(json.dumps(data))
    assert main(["explain", str(folder), "--dtype", "float32", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    chosen = {(path, row["chosen"]) for row in report["rows"] if row["op"] == "rms_norm" for path in row["modules"]}
    assert ("model.layers.0.self_attn.q_norm", "eager") in chosen
    assert ("model.norm", "torch_fused") in chosen
    assert "measured here" in report["note"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--against", "hf,unslth"], "'unslth' is no peer"),
        (["--against", "veomni"], "pip install veomni"),
        (["--against", "veomni", "--peer-path", "veomni=/no/such/place"], "there is no such folder"),
        (["--peer-path", "veomni"], "is not PEER=DIR"),
        (["--model", "/no/such/place"], "neither a folder with config.json, nor such a file, nor a model type"),
        (["--model", "{folder}", "--set", "rms_norm"], "is not FIELD=VALUE"),
        (["--op", "rms_nrm"], "did you mean 'rms_norm'"),
        (["--dtype", "bf17"], "is no floating dtype"),
        (["--dtype", "int32"], "--dtype 'int32' is no floating dtype"),
        (["--device", "gpu0"], "device 'gpu0' is none that torch knows"),
        (["--device", "cuda:99"], "device 'cuda:99': the number of GPUs"),
        (["--tokens", "-1"], "--tokens -1: it takes 1 or more"),
        (["--tokens", "0"], "--tokens 0: it takes 1 or more"),
        (["--model", "{folder}", "--layers", "0"], "--layers 0: it takes 1 or more"),
        (["--model", "{folder}", "--batch", "0"], "--batch 0: it takes 1 or more"),
        (["--model", "{folder}", "--length", "1"], "--length 1: it takes 2 or more"),
        (["--model", "{folder}", "--steps", "-3"], "--steps -3: it takes 0 or more"),
        (["--model", "{folder}", "--limit", "0"], "--limit 0: it takes 1 or more"),
        (["--model", "{folder}", "--set", "rms_norm=eager"], "rms_norm is not a field"),
        (["--model", "{folder}", "--set", "rms_norm_implementation=trition"], "did you mean 'triton'"),
        (["--html", "/no/such/folder/page.html"], "does not exist; make it first"),
        (["--output", "{folder}"], "is a folder; name a file"),
        (["--picture", "/proc/nothing.png"], "cannot be written"),
        (["--picture", "{folder}/who.txt"], "who.txt' must end in .png or .svg"),
        (["--picture", "{folder}/who"], "who' must end in .png or .svg"),
        (["--html", "{folder}/a.svg", "--picture", "{folder}/a.svg"], "--picture and --html name the same file"),
        (["--dtype", "float64"], "--dtype 'float64': kernels are judged against float64"),
        (["--peer-path", "hf={folder}", "--against", "liger"], "--peer-path hf=...: it is not compared with"),
        (["--model", "{folder}", "--step-only", "--steps", "0"], "--step-only --steps 0 measures nothing"),
        (["--curve", "200"], "--curve needs --model"),
        (["--tune"], "OPSLOT_PROFILE=off: there is no profile to write"),
        (["--model", "{folder}", "--curve", "2"], "at least 4 steps"),
        (["--model", "{folder}", "--curve", "4", "--step-only", "--steps", "0"], "vocab_size is 64"),
    ],
)
def test_wrong_use_is_one_message_before_anything_is_measured(folder, capsys, arguments, message):
    given = [a.replace("{folder}", str(folder)) for a in arguments]
    assert main(["bench", "--device", "cpu", *given]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err
    assert not captured.out
    assert [path.name for path in folder.iterdir() if not path.stat().st_size] == []


def task_file(folder, contender, **changes):
    task = {
        "model": json.loads((folder / "config.json").read_text()),
        "batch": 2,
        "length": 16,
        "steps": 2,
        "dtype": "float32",
        "device": "cpu",
        "ops": {},
        "trace": False,
        "lr": 1e-3,
        "text": "",
        "contender": contender,
    }
    path = folder / f"{contender}.json"
    path.write_text(json.dumps(task | changes))
    return path


def test_contenders_start_alike_and_train_alike(folder):
    losses = {}
    for name in ("opslot", "opslot eager", "hf"):
        path = task_file(folder, name)
        assert contend([str(path)]) == 0
        result = json.loads(path.with_suffix(".result").read_text())
        losses[name] = result["losses"]
        assert result["tokens_per_s"] > 0
        chosen = result["kernels"].partition("\n\n")[0]
        assert ("torch_fused" in chosen) == (name == "opslot")
    assert losses["hf"][-1] < losses["hf"][0] - 0.01, "five steps on one batch lower its loss"
    assert losses["opslot"] == pytest.approx(losses["hf"], rel=1e-5)
    assert losses["opslot eager"] == pytest.approx(losses["hf"], rel=1e-6)


def test_every_op_is_written_before_the_next_is_measured(tmp_path, monkeypatch):
    file = tmp_path / "ops.json"
    seen = []

    def rows(op, *, say, **options):
        for name in ("adamw", "rms_norm"):
            say(f"{name}: proofs of triton")
            seen.append({row["op"] for row in json.loads(file.read_text())["rows"]} if file.exists() else set())
            for kernel in ("eager", "triton"):
                yield BenchRow(name, "standard", "a case", kernel, "float32", ms=1.0)
        raise KernelError("triton left the device unsupported")

    monkeypatch.setattr("opslot.bench.main.bench", rows)
    assert main(["bench", "--device", "cpu", "--output", str(file)]) == 2
    assert seen == [set(), {"adamw"}]
    assert len(json.loads(file.read_text())["rows"]) == 4


def test_a_contender_that_fails_is_a_row_and_the_rest_goes_on(folder, monkeypatch):
    model = json.loads((folder / "config.json").read_text())
    broken = Task("tiny", {**model, "hidden_size": "wide"}, 1, 8, 1, "float32", "cpu")
    monkeypatch.setattr("opslot.bench.steps.contenders", lambda peers: ["opslot", "hf"])
    said = []
    *_, rows = compare_steps(broken, [], said.append)
    assert [(r["model"], r["contender"]) for r in rows] == [("tiny", "opslot"), ("tiny", "hf")]
    assert all("hidden_size" in r["error"] or "wide" in r["error"] for r in rows)
    assert said == ["training step: opslot", "training step: hf"]


def test_every_contender_of_a_peer_is_asked():
    assert contenders([]) == ["opslot", "opslot eager"]
    assert contenders(["hf", "veomni"])[2:] == ["hf", "hf+compile", "veomni"]
    assert contenders(["quack"]) == contenders([]), "quack-kernels trains no models of its own"


def test_a_step_that_computes_something_else_does_not_count():
    def row(name, first, last):
        return {"contender": name, "first_loss": first, "last_loss": last}

    rows = _judged([row("opslot", 12.0, 11.01), row("hf", 12.0, 11.0), row("fast", 12.0, 10.5)])
    assert [r["check"] for r in rows] == ["ok", "ok", "WRONG: a loss is 4.5% from that of hf"]
    assert _judged([row("fast", 1.0, 1.0)])[0]["check"].startswith("unproven")


def test_the_reason_of_a_failure_is_its_exception():
    trace = "Traceback\n  File x\nValueError: first\n\nDuring\n  File y\nopslot.errors.ConfigError: bad:\n- one\n- two"
    assert _reason(trace) == "opslot.errors.ConfigError: bad: - one - two"
    assert _reason("Killed") == "Killed"
    assert _reason("") == ""
    assert (_ended(-9), _ended(3)) == ("killed by SIGKILL", "exit code 3")


ROWS = [
    BenchRow("rms_norm", "standard", "8x8", "eager", "float32", 2.0, 2.5, 0.5, 3.0, "ok"),
    BenchRow("rms_norm", "standard", "8x8", "triton", "float32", 1.0, 1.5, 0.5, 3.0, "ok"),
    BenchRow("rms_norm", "standard", "8x8", "cheat", "float32", 0.5, 0.6, 0.5, 3.0, "WRONG out <error> 1.0e+00"),
    BenchRow("rms_norm", "standard", "8x8", "peer: x", "float32", verdict="RuntimeError: no & device"),
]
STEPS = [
    {
        "model": "tiny",
        "contender": "opslot",
        "ms": 1.0,
        "tokens_per_s": 1e3,
        "peak_gib": 1.5,
        "first_loss": 3.0,
        "last_loss": 2.0,
    },
    {
        "model": "tiny",
        "contender": "hf",
        "ms": 2.0,
        "tokens_per_s": 5e2,
        "peak_gib": None,
        "first_loss": 3.0,
        "last_loss": 2.0,
    },
    {"model": "tiny", "contender": "liger", "error": "ImportError: <none>"},
]
CURVE = {
    "steps": 4,
    "batch": [2, 16],
    "losses": {"Transformers": [4.0, 3.0, 2.5, 2.0], "opslot": [4.0, 3.1, 2.5, 2.0], "rounding": [4.0, 3, 2.5, 2]},
    "apart": {"largest": 0.1, "mean": 0.025, "last": 0.0},
    "rounding": {"largest": 0.0, "mean": 0.0, "last": 0.0},
}
MACHINE = {
    "device": "NVIDIA <H200>",
    "date": "2026-11-20",
    "commit": "abc1234",
    "python": "3.12",
    "versions": {"torch": "2.11"},
}


def test_the_table_puts_the_fastest_proven_first_and_what_failed_last():
    ((_, group),) = sites(ROWS).items()
    assert [r.kernel for r in group] == ["triton", "eager", "cheat", "peer: x"]
    lines = ops_table(ROWS).splitlines()[2:]
    assert re.search(r"triton +1\.000 +1\.500 +2\.00 +50% +3 +ok", lines[0])
    assert re.search(r"cheat +\(0\.500\) +- +- +- +3 +WRONG out <error>", lines[2])


def test_the_page_holds_everything_and_needs_nothing():
    text = page(ROWS, _judged([dict(s) for s in STEPS]), CURVE, MACHINE, "opslot bench --html x")
    for needed in (
        "NVIDIA &lt;H200&gt;",
        "abc1234",
        "torch 2.11",
        "opslot bench --html x",
        "WRONG out &lt;error&gt; 1.0e+00",
        "RuntimeError: no &amp; device",
        "ImportError: &lt;none&gt;",
        "0.1000",
        *(r.kernel for r in ROWS),
        *(s["contender"] for s in STEPS),
    ):
        assert needed in text, needed
    assert not re.search(r"https?:|//|<script|<link|<img|@import|url\(|src=", text), "nothing from elsewhere"
    assert "prefers-color-scheme: dark" in text
    best = re.findall(r'<tr class="best"><td class="l">([^<]*)', text)
    assert best == ["triton", "opslot"], "nothing that failed its check wins"


def test_a_bar_far_ahead_of_all_others_is_cut():
    assert bar_limit([0.18, 0.2, 0.3, 2.7]) == pytest.approx(0.375)
    assert bar_limit([1.0, 2.0, 3.0]) == 3.0
    assert bar_limit([1.0, 9.0]) == 9.0
    assert bar_limit([]) == 1.0


def test_results_of_several_runs_make_one_page(tmp_path, capsys):
    rows = [as_dict(r) for r in ROWS]
    old = {"environment": MACHINE, "rows": [*rows[:1], {**rows[1], "ms": 9.0}], "steps": _judged([dict(STEPS[0])])}
    new = {"environment": {**MACHINE, "commit": "def5678"}, "rows": rows[1:], "curve": CURVE}
    other = {**new, "environment": {**MACHINE, "device": "CPU"}}
    files = []
    for i, data in enumerate((old, new, other, {"rows": []})):
        files.append(tmp_path / f"{i}.json")
        files[-1].write_text(json.dumps(data))
    page_file, out = tmp_path / "page.html", tmp_path / "all.json"
    given = ["bench", "--merge", str(files[0]), str(files[1]), "--html", str(page_file), "--output", str(out)]
    assert main(given) == 0
    assert "triton" in capsys.readouterr().out
    merged = json.loads(out.read_text())
    assert [(r["kernel"], r["ms"]) for r in merged["rows"]] == [(r.kernel, r.ms) for r in ROWS]
    assert merged["curve"] == CURVE
    assert merged["environment"] == {**MACHINE, "commit": "abc1234, def5678"}
    assert merged["steps"] == old["steps"]
    assert "Loss curve" in page_file.read_text()
    assert main(["bench", "--merge", str(files[0]), str(files[2])]) == 2
    assert "different devices: CPU, NVIDIA <H200>" in capsys.readouterr().err
    for text in (files[3].read_text(), "[" * 100_000):
        files[3].write_text(text)
        assert main(["bench", "--merge", str(files[3])]) == 2
        assert "is no result of `opslot bench --output`" in capsys.readouterr().err
    for file, said in ((tmp_path / "gone.json", "No such file or directory"), (tmp_path, "Is a directory")):
        assert main(["bench", "--merge", str(file)]) == 2
        assert capsys.readouterr().err.startswith(f"opslot: error: --merge {str(file)!r} cannot be read: {said}")


@pytest.mark.parametrize(
    "change",
    [
        {"rows": [1]},
        {"rows": [{"op": "rms_norm"}]},
        {"rows": {"a": 1}},
        {"rows": [{**as_dict(ROWS[0]), "ms": "fast"}]},
        {"rows": [{**as_dict(ROWS[0]), "ms": float("nan")}]},
        {"steps": [{}]},
        {"steps": 4},
        {"curve": {"steps": 1}},
        {"environment": {"device": ["CPU"]}},
        {"environment": {**MACHINE, "versions": None}},
    ],
)
def test_merge_tells_which_file_holds_something_else(tmp_path, capsys, change):
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    data = {"environment": MACHINE, "rows": [as_dict(ROWS[0])]}
    good.write_text(json.dumps(data))
    bad.write_text(json.dumps(data | change))
    assert main(["bench", "--merge", str(good), str(bad), "--html", str(tmp_path / "page.html")]) == 2
    err = capsys.readouterr().err
    assert f"--merge {str(bad)!r} is no result of `opslot bench --output`" in err
    assert not (tmp_path / "page.html").exists()


def test_nothing_measured_yet_is_no_picture(tmp_path):
    draw([], [], None, MACHINE, tmp_path / "page.png")
    assert not list(tmp_path.iterdir())
    draw([], [], CURVE, MACHINE, tmp_path / "page.png")
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def interruptible():
    """Handles SIGINT as Python does from a terminal: a shell has it ignored by what runs in its background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(("ended", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_bench_that_is_stopped_keeps_what_it_measured(ended, code, tmp_path, capsys, monkeypatch):
    def measured(ops, **options):
        assert ops == ["swiglu_mlp", "rms_norm"]
        yield BenchRow("swiglu_mlp", "standard", "4x8", "eager", "float32", ms=1.0, verdict="ok")
        signal.raise_signal(ended)
        yield BenchRow("rms_norm", "standard", "4x8", "eager", "float32", ms=1.0, verdict="ok")

    monkeypatch.setattr("opslot.bench.main.bench", measured)
    output = tmp_path / "result.json"
    before = signal.getsignal(signal.SIGTERM)
    asked = ["bench", "--op", "swiglu_mlp,rms_norm", "--device", "cpu", "--output", str(output)]
    if ended == signal.SIGINT:
        assert main(asked) == code
        assert capsys.readouterr().err.endswith("opslot: interrupted\n")
    else:
        with pytest.raises(SystemExit) as stopped:
            main(asked)
        assert stopped.value.code == code
    assert [row["op"] for row in json.loads(output.read_text())["rows"]] == ["swiglu_mlp"]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_peer_without_a_kernel_of_the_op_adds_no_row(capsys):
    assert main(["bench", "--op", "adamw", "--peers-only", "--against", "hf", "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == []


def test_tuning_keeps_an_op_before_it_goes_on_to_the_next(folder, tmp_path, monkeypatch):
    profile = tmp_path / "profile.json"
    monkeypatch.setenv("OPSLOT_PROFILE", str(profile))
    shape = {"width": 8, "heads": 1}

    def measured(ops, say, **options):
        say("rms_norm: proofs")
        yield BenchRow("rms_norm", "standard", "x", "eager", "float32", ms=1.0, verdict="ok", shape=shape, tokens=4)
        say("swiglu_mlp: proofs")
        assert [t["op"] for t in json.loads(profile.read_text())["machines"][0]["timings"]] == ["rms_norm"]
        yield BenchRow("swiglu_mlp", "standard", "x", "eager", "float32", ms=1.0, verdict="ok", shape=shape, tokens=4)
        raise KeyboardInterrupt

    monkeypatch.setattr("opslot.bench.main.bench", measured)
    assert main(["bench", "--tune", "--model", str(folder), "--device", "cpu"]) == 130
    # The second op may lack the kernel that would have come next and been faster.
    assert [t["op"] for t in json.loads(profile.read_text())["machines"][0]["timings"]] == ["rms_norm"]
