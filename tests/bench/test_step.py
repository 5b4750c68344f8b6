import json
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from opslot._base.errors import ConfigError
from opslot.bench import step_process
from opslot.bench.options import BenchOptions
from opslot.bench.result import StepRow
from opslot.bench.run import run_bench
from opslot.bench.step import _exit_status, _result_of, check_losses, compare_steps, implementations, reason
from opslot.bench.step_process import main as measure_in_process
from tests import omni

OPTIONS = BenchOptions(batch=1, length=8, steps=1, dtype="float32", device="cpu")


def task_file(folder, implementation, **changes):
    task = {
        "model": json.loads((folder / "config.json").read_text()),
        "batch": 2,
        "length": 16,
        "steps": 2,
        "dtype": "float32",
        "device": "cpu",
        "ops_implementation": {},
        "trace": False,
        "image_size": 0,
        "audio_seconds": 0,
        "lr": 1e-3,
        "text": "",
        "implementation": implementation,
    }
    path = folder / f"{implementation}.json"
    path.write_text(json.dumps(task | changes))
    return path


class Forked:
    """A fork with the interface of the `Popen` that measures an implementation."""

    def __init__(self, fork, errors):
        self.fork, self.errors = fork, errors

    @property
    def returncode(self):
        return self.fork.returncode

    def poll(self):
        code = self.fork.poll()
        if code is not None:
            Path(self.errors).write_text(self.fork.read("stderr"))
        return code

    def wait(self):
        self.fork.wait(120)


@pytest.fixture
def forked(forks, monkeypatch):
    """Measure implementations in forks, which start faster than new processes."""

    def start(command, *, stderr, env, **_):
        assert command[1:3] == ["-m", "opslot.bench.step_process"]
        return Forked(forks.start(step_process.__file__, *command[3:], env=env), stderr.name)

    monkeypatch.setattr("opslot.bench.step.subprocess", SimpleNamespace(Popen=start, DEVNULL=None))


# Dynamo reads the gradient of a layer's input, a non-leaf tensor.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.quick("eager")
@pytest.mark.parametrize(
    "compiled", [(), ("torch.compile", "compiled layers", "CUDA graphs")], ids=["eager", "compiled"]
)
def test_implementations_train_from_the_same_weights(moe_config_folder, monkeypatch, compiled):
    # Without the C++ compiler, which takes seconds.
    compile_module = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda module, mode=None: compile_module(module, backend="aot_eager")
    )
    losses = {}
    own = ("opslot", *(f"opslot + {name}" for name in compiled))
    for name in (*own, "opslot eager", "Transformers"):
        path = task_file(moe_config_folder, name)
        assert measure_in_process([str(path)]) == 0
        result = json.loads(path.with_suffix(".result").read_text())
        losses[name] = result["losses"]
        assert result["tokens_per_s"] > 0
        chosen = result["kernels"].partition("\n\n")[0]
        assert ("torch_fused" in chosen) == (name in own)
    assert losses["Transformers"][-1] < losses["Transformers"][0] - 0.01, "five steps on one batch lower its loss"
    assert losses["opslot"] == pytest.approx(losses["Transformers"], rel=1e-5)
    for name in own[1:]:
        assert losses[name] == pytest.approx(losses["opslot"], rel=1e-5)
    assert losses["opslot eager"] == pytest.approx(losses["Transformers"], rel=1e-6)


def test_images_and_audio_are_packed_for_opslot_and_not_for_transformers(tmp_path):
    model = omni.qwen2_5_omni().to_dict()
    model["thinker_config"]["audio_end_token_id"] = 46
    (tmp_path / "config.json").write_text(json.dumps(model))
    losses = []
    for name in ("opslot", "Transformers"):
        path = task_file(tmp_path, name, image_size=16, audio_seconds=1, steps=1)
        assert measure_in_process([str(path)]) == 0
        found = json.loads(path.with_suffix(".result").read_text())
        losses.append(found["losses"])
        assert 0 < found["vision_ms"] < found["ms"]
        assert 0 < found["audio_ms"] < found["ms"]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0][-1] < losses[0][0]


def test_time_of_a_tower_is_that_of_its_forward_and_backward_pass(monkeypatch):
    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            clock[0] += 1
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            clock[0] += 10
            return grad * 2

    class Tower(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x):
            return Slow.apply(x * self.weight)

    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    model = nn.ModuleDict({"audio_tower": Tower(), "language_model": Tower()})
    times = step_process.TowerTimes(model, ("audio_tower",), torch.device("cpu"))
    absent = step_process.TowerTimes(model, ("visual",), torch.device("cpu"))
    for _ in range(2):
        model["language_model"](model["audio_tower"](torch.ones(3))).sum().backward()
    assert times.median(1) == pytest.approx(11e3)
    assert absent.median(1) is None


def test_a_model_that_is_compiled_whole_has_no_time_of_a_tower():
    model = nn.Sequential()
    model.add_module("visual", nn.Linear(3, 3))
    times = step_process.TowerTimes(model, ("visual",), torch.device("cpu"))
    compiled = torch.compile(model, backend="eager")
    for _ in range(2):
        compiled(torch.ones(2, 3)).sum().backward()
    assert times.median(1) is None


def test_implementation_that_fails_has_a_row_and_others_run(moe_config_folder, monkeypatch, forked):
    model = json.loads((moe_config_folder / "config.json").read_text())
    broken = {**model, "hidden_size": "wide"}
    monkeypatch.setattr("opslot.bench.step.implementations", lambda *_: ["opslot", "Transformers"])
    lines = []
    *_, rows = compare_steps({"tiny": broken}, OPTIONS, lines.append)
    assert [(r.model, r.implementation) for r in rows] == [("tiny", "opslot"), ("tiny", "Transformers")]
    assert all("hidden_size" in r.error or "wide" in r.error for r in rows)
    assert not any(r.valid for r in rows)
    assert lines == ["training step: opslot, tiny", "training step: Transformers, tiny"]


def test_models_after_one_that_fails_are_measured(moe_config_folder, monkeypatch, forked):
    """The process of an implementation ends at a failure; another one measures the models after it."""
    model = json.loads((moe_config_folder / "config.json").read_text())
    models = {"first": model, "broken": {**model, "hidden_size": "wide"}, "third": model, "fourth": model}
    monkeypatch.setattr("opslot.bench.step.implementations", lambda *_: ["opslot"])
    *_, rows = compare_steps(models, OPTIONS, [].append)
    assert [(row.model, bool(row.error)) for row in rows] == [
        ("first", False),
        ("broken", True),
        ("third", False),
        ("fourth", False),
    ]
    assert rows[0].first_loss == rows[2].first_loss == rows[3].first_loss


def test_implementations_include_every_model_of_a_baseline():
    assert implementations([]) == ["opslot", "opslot eager"]
    assert implementations([], compiled=True) == [
        "opslot",
        "opslot + torch.compile",
        "opslot + compiled layers",
        "opslot + CUDA graphs",
        "opslot + layers as CUDA graphs",
        "opslot eager",
    ]
    on_cpu = implementations([], compiled=True, on_gpu=False)
    assert on_cpu == [
        "opslot",
        "opslot + torch.compile",
        "opslot + compiled layers",
        "opslot + CUDA graphs",
        "opslot eager",
    ]
    assert implementations(["hf", "veomni"]) == ["opslot", "Transformers", "Transformers + FlashAttention 4", "VeOmni"]
    assert "Transformers + torch.compile" in implementations(["hf"], compiled=True)
    assert implementations(["quack"]) == implementations([]), "quack-kernels has no training model"


def test_step_with_another_loss_fails_its_check():
    def row(name, first, last):
        return StepRow("tiny", name, 2, 16, tokens_per_s=1.0, first_loss=first, last_loss=last)

    rows = check_losses([row("opslot", 12.0, 11.01), row("Transformers", 12.0, 11.0), row("fast", 12.0, 10.5)])
    assert [r.check for r in rows] == ["ok", "ok", "WRONG: a loss differs by 4.5% from Transformers"]
    assert [r.valid for r in rows] == [True, True, False]
    assert check_losses([row("fast", 1.0, 1.0)])[0].check.startswith("unchecked")


def test_reason_of_a_failure_with_a_process_group_is_its_exception():
    text = """[rank0]: Traceback (most recent call last):
[rank0]:   File "x.py", line 1, in <module>
[rank0]: torch.OutOfMemoryError: CUDA out of memory.
[rank0]:[W1123 02:50:14.302919602 ProcessGroupNCCL.cpp:1575] Warning: WARNING: destroy_process_group() was not called
"""
    assert reason(text) == "torch.OutOfMemoryError: CUDA out of memory."


def test_reason_of_a_failure_is_its_exception():
    trace = "Traceback\n  File x\nValueError: first\n\nDuring\n  File y\nopslot.errors.ConfigError: bad:\n- one\n- two"
    assert reason(trace) == "opslot.errors.ConfigError: bad: - one - two"
    assert reason("Killed") == "Killed"
    assert reason("") == ""
    assert (_exit_status(-9), _exit_status(3)) == ("killed by SIGKILL", "exit code 3")


def test_killed_process_is_reported_with_its_signal(tmp_path):
    errors = tmp_path / "errors"
    with errors.open("w") as file:
        process = subprocess.Popen(["sh", "-c", "echo 'a warning' >&2; kill -KILL $$"], stderr=file)
    assert _result_of(process, tmp_path / "result", errors, 60) == {"error": "killed by SIGKILL"}


def test_process_beyond_its_time_limit_is_killed(tmp_path):
    process = subprocess.Popen(["sleep", "60"])
    found = _result_of(process, tmp_path / "result", tmp_path / "errors", 0)
    assert found == {"error": "not done after 0 s"}
    assert process.returncode == -9


def test_only_named_implementations_are_timed(moe_config_folder, forked):
    model = json.loads((moe_config_folder / "config.json").read_text())
    options = replace(OPTIONS, baselines=("hf",), implementations=("opslot eager",))
    *_, rows = compare_steps({"tiny": model}, options, [].append)
    assert [row.implementation for row in rows] == ["opslot eager"]
    assert not rows[0].error


def test_unknown_implementation_raises():
    with pytest.raises(ConfigError, match="unknown names") as error:
        run_bench(BenchOptions(implementations=("opslot", "VeOmmi"), device="cpu"))
    assert "VeOmmi" in str(error.value)
