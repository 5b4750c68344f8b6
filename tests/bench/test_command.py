import json
import signal
from pathlib import Path

import pytest

from opslot._base.errors import KernelError
from opslot.bench.options import BenchOptions
from opslot.bench.result import OpRow, read, recorded_command
from opslot.bench.run import run_bench
from opslot.cli import main


def test_tune_measures_a_model_and_auto_uses_the_profile(moe_config_folder, tmp_path, capsys, monkeypatch):
    profile = tmp_path / "profile.json"
    monkeypatch.setenv("OPSLOT_PROFILE", str(profile))
    files = {name: tmp_path / f"result.{name}" for name in ("html", "json", "png")}
    options = ["--op", "rms_norm", "--device", "cpu", "--dtype", "float32", "--tokens", "8", "--tune"]
    written = ["--html", str(files["html"]), "--output", str(files["json"]), "--plot", str(files["png"])]
    assert main(["bench", "--model", str(moe_config_folder), *options, *written]) == 0
    captured = capsys.readouterr()
    assert "rms_norm/standard" in captured.out
    assert f"wrote {profile}" in captured.err
    (machine,) = json.loads(profile.read_text())["machines"]
    found = {t["shape"]["width"]: t for t in machine["timings"] if t["op"] == "rms_norm" and t["variant"] == "standard"}
    assert set(found) == {8, 32}, "norms of heads and of the model"
    assert {"eager", "torch_fused"} <= set(found[32]["ms"])
    result = read(files["json"])
    assert {r.kernel for r in result.ops} >= {"eager", "torch_fused"}
    assert files["png"].read_bytes().startswith(b"\x89PNG")

    data = json.loads(profile.read_text())
    for timing in data["machines"][0]["timings"]:
        timing["ms"] = {"eager": 1.0 if timing["shape"].get("width") == 8 else 3.0, "torch_fused": 2.0}
    profile.write_text(json.dumps(data))
    assert main(["explain", str(moe_config_folder), "--dtype", "float32", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    chosen = {(path, row["chosen"]) for row in report["rows"] if row["op"] == "rms_norm" for path in row["modules"]}
    assert ("model.layers.0.self_attn.q_norm", "eager") in chosen
    assert ("model.norm", "torch_fused") in chosen
    assert "measured here" in report["note"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--baselines", "hf,unslth"], "unknown baseline 'unslth'"),
        (["--baselines", "veomni"], "pip install veomni"),
        (["--baselines", "veomni", "--baseline-path", "veomni=/no/such/place"], "the folder does not exist"),
        (["--baseline-path", "veomni"], "is not NAME=DIR"),
        (["--model", "/no/such/place"], "neither a folder with config.json, nor such a file, nor a model type"),
        (["--model", "{folder}", "--set", "rms_norm"], "is not FIELD=VALUE"),
        (["--op", "rms_nrm"], "did you mean 'rms_norm'"),
        (["--dtype", "bf17"], "is not a floating dtype"),
        (["--dtype", "int32"], "--dtype 'int32' is not a floating dtype"),
        (["--device", "gpu0"], "device 'gpu0' is not a valid device"),
        (["--device", "cuda:99"], "device 'cuda:99': the number of GPUs"),
        (["--model", "{folder}", "--set", "rms_norm=eager"], "rms_norm is not a field"),
        (["--model", "{folder}", "--set", "rms_norm_implementation=trition"], "did you mean 'triton'"),
        (["--html", "/no/such/folder/page.html"], "does not exist\n  hint: create it first"),
        (["--output", "{folder}"], "is a folder\n  hint: name a file"),
        (["--plot", "/proc/nothing.png"], "cannot be written"),
        (["--plot", "{folder}/who.txt"], "who.txt' is not a format that can be drawn\n  hint: end it in .png or .svg"),
        (["--plot", "{folder}/who"], "who' is not a format that can be drawn"),
        (["--html", "{folder}/a.svg", "--plot", "{folder}/a.svg"], "--plot and --html name the same file"),
        (["--dtype", "float64"], "--dtype 'float64': kernels are compared with a float64 reference"),
        (["--baseline-path", "hf={folder}", "--baselines", "liger"], "--baseline-path hf=...: it is not compared with"),
        (["--model", "{folder}", "{folder}/config.json", "{folder}/config.json", "--steps-only"], "have the same name"),
        (["--model", "{folder}", "--steps-only", "--steps", "0"], "--steps-only --steps 0 measures nothing"),
        (["--curve", "200"], "--curve requires --model"),
        (["--compile"], "--compile requires --model"),
        (["--image-size", "64"], "--image-size requires --model"),
        (["--model", "{folder}", "--image-size", "64"], "found: model_type 'qwen3_moe'"),
        (["--model", "{folder}", "--image-size", "64", "--curve", "4"], "so it takes no --image-size"),
        (["--model", "{folder}", "--audio-seconds", "1"], "--audio-seconds requires models that take audio as mel"),
        (["--tune"], "OPSLOT_PROFILE=off: no profile can be written"),
        (["--model", "{folder}", "--curve", "2"], "at least 4 steps"),
        (["--model", "{folder}", "--curve", "4", "--steps-only", "--steps", "0"], "vocab_size is 64"),
    ],
)
def test_invalid_options_raise_before_measuring(moe_config_folder, capsys, arguments, message):
    given = [a.replace("{folder}", str(moe_config_folder)) for a in arguments]
    assert main(["bench", "--device", "cpu", *given]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err
    assert not captured.out
    assert [path.name for path in moe_config_folder.iterdir() if not path.stat().st_size] == []


@pytest.mark.parametrize(
    ("option", "least"),
    [
        ("tokens", 1),
        ("layers", 1),
        ("batch", 1),
        ("length", 2),
        ("steps", 0),
        ("timeout", 1),
        ("image-size", 0),
        ("audio-seconds", 0),
    ],
)
def test_numbers_that_are_too_small_exit_2(capsys, option, least):
    with pytest.raises(SystemExit) as caught:
        main(["bench", f"--{option}", str(least - 1)])
    assert caught.value.code == 2
    assert f"argument --{option}: {least - 1} must be at least {least}\n" in capsys.readouterr().err


def test_recorded_command_has_no_absolute_paths():
    here = Path.cwd()
    arguments = [
        "opslot",
        "bench",
        "--model",
        str(here / "models/a.json"),
        "--baseline-path",
        "veomni=/opt/peers",
        "--trace",
    ]
    assert recorded_command(*arguments) == "opslot bench --model models/a.json --baseline-path veomni=peers --trace"


def test_each_op_is_written_before_the_next_is_measured(tmp_path, monkeypatch):
    file = tmp_path / "ops.json"
    seen = []

    def rows(op, *, report, **options):
        for name in ("adamw", "rms_norm"):
            report(f"{name}: checking triton")
            seen.append({row.op for row in read(file).ops} if file.exists() else set())
            for kernel in ("eager", "triton"):
                yield OpRow(name, "standard", "a case", kernel, "float32", ms=1.0)
        raise KernelError("triton left the device unusable")

    monkeypatch.setattr("opslot.bench.run.bench_ops", rows)
    assert main(["bench", "--device", "cpu", "--output", str(file)]) == 2
    assert seen == [set(), {"adamw"}]
    assert len(read(file).ops) == 4


@pytest.fixture
def interruptible():
    """Restore Python's SIGINT handler; background jobs of a shell ignore the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(("ended", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_bench_keeps_what_it_measured(ended, code, tmp_path, capsys, monkeypatch):
    def measured(ops, **options):
        assert ops == ("swiglu_mlp", "rms_norm")
        yield OpRow("swiglu_mlp", "standard", "4x8", "eager", "float32", ms=1.0, check="ok")
        signal.raise_signal(ended)
        yield OpRow("rms_norm", "standard", "4x8", "eager", "float32", ms=1.0, check="ok")

    monkeypatch.setattr("opslot.bench.run.bench_ops", measured)
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
    assert [row.op for row in read(output).ops] == ["swiglu_mlp"]
    assert signal.getsignal(signal.SIGTERM) is before


def test_baseline_without_a_kernel_of_the_op_adds_no_row(capsys):
    assert main(["bench", "--op", "adamw", "--baselines-only", "--baselines", "hf", "--device", "cpu", "--json"]) == 0
    assert "ops" not in json.loads(capsys.readouterr().out)["runs"][0]


def test_tuning_writes_each_op_before_the_next(moe_config_folder, tmp_path, monkeypatch):
    profile = tmp_path / "profile.json"
    monkeypatch.setenv("OPSLOT_PROFILE", str(profile))
    shape = {"width": 8, "heads": 1}

    def measured(ops, report, **options):
        report("rms_norm: checking")
        yield OpRow("rms_norm", "standard", "x", "eager", "float32", ms=1.0, check="ok", shape=shape, tokens=4)
        report("swiglu_mlp: checking")
        assert [t["op"] for t in json.loads(profile.read_text())["machines"][0]["timings"]] == ["rms_norm"]
        yield OpRow("swiglu_mlp", "standard", "x", "eager", "float32", ms=1.0, check="ok", shape=shape, tokens=4)
        raise KeyboardInterrupt

    monkeypatch.setattr("opslot.bench.run.bench_ops", measured)
    assert main(["bench", "--tune", "--model", str(moe_config_folder), "--device", "cpu"]) == 130
    # The second op may lack the kernel that was not measured yet.
    assert [t["op"] for t in json.loads(profile.read_text())["machines"][0]["timings"]] == ["rms_norm"]


def test_run_bench_from_python(monkeypatch):
    monkeypatch.setattr(
        "opslot.bench.run.bench_ops",
        lambda ops, **options: iter([OpRow("rms_norm", "standard", "4x8", "eager", "float32", ms=1.0, check="ok")]),
    )
    lines = []
    result = run_bench(BenchOptions(ops=("rms_norm",), device="cpu", commit="abc"), report=lines.append)
    assert [row.kernel for row in result.ops] == ["eager"]
    assert result.runs[0].environment.commit == "abc"
    assert lines == ["rms_norm/standard, 4x8: eager 1.000 ms"]


def test_failed_check_of_a_registered_kernel_is_exit_code_1(monkeypatch, capsys):
    def rows(kernel):
        return lambda ops, **options: iter([OpRow("rms_norm", "standard", "4x8", kernel, "float32", check="WRONG out")])

    for kernel, code in (("triton", 1), ("torch.compile", 0), ("liger: in place", 0)):
        monkeypatch.setattr("opslot.bench.run.bench_ops", rows(kernel))
        assert main(["bench", "--op", "rms_norm", "--device", "cpu"]) == code
    assert "WRONG out" in capsys.readouterr().out
