"""Throughput, MFU and profiles of a run."""

import json

import pytest
import torch

from opslot._base.device import peak_bf16_tflops
from opslot.trainer.callbacks.base import StepRecord
from opslot.trainer.callbacks.profile import PROFILE_FOLDER
from opslot.trainer.callbacks.progress import _speed, _waiting
from opslot.trainer.callbacks.writers import read_metrics
from opslot.trainer.config import LoggingConfig, TrainConfig
from opslot.trainer.throughput import StepMeter


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A10", 125),
        ("NVIDIA L40S", 362),
        ("NVIDIA B200", 2250),
        ("NVIDIA GeForce RTX 4090", 165),
        ("CPU", None),
        ("NVIDIA H2000", None),
    ],
)
def test_peak_of_device_name(name, peak):
    assert peak_bf16_tflops(name) == peak


def test_meter_divides_by_processes_and_peak(monkeypatch):
    clock = [10.0]
    monkeypatch.setattr("opslot.trainer.throughput.time.perf_counter", lambda: clock[0])
    meter = StepMeter(
        torch.nn.Linear(4, 8), TrainConfig(logging=LoggingConfig(peak_tflops=2.0)), torch.device("cpu"), world_size=4
    )
    meter.start()
    with meter.waiting_for("data"):
        clock[0] += 0.5
    with meter.waiting_for("device"):
        clock[0] += 1.0
    clock[0] += 0.5
    found = meter.measurements(tokens=4000, flops=8e12)
    assert found == {
        "tokens_per_s": 2000,
        "tokens_per_s_per_gpu": 500,
        "tflops_per_gpu": 1.0,
        "mfu": 0.5,
        "data_wait": 0.25,
        "device_wait": 0.5,
    }
    batch = {"input_ids": torch.zeros(2, 6)}
    # Without a gradient of the input, a layer has one matmul in backward.
    assert meter.count([batch, batch]) == 24 * 2 * (2 * 4 * 8)


def test_float32_has_no_default_peak(monkeypatch):
    monkeypatch.setattr("opslot.trainer.throughput.peak_bf16_tflops", lambda name: 100.0)
    meter = StepMeter(torch.nn.Linear(4, 8), TrainConfig(), torch.device("cpu"), world_size=1)
    assert meter.peak_tflops is None
    half = StepMeter(torch.nn.Linear(4, 8).bfloat16(), TrainConfig(), torch.device("cpu"), world_size=1)
    assert half.peak_tflops == 100.0


def test_metrics_and_progress_have_mfu(train, tmp_path):
    code, output, _ = train("--train.logging.peak_tflops", "0.001")
    assert code == 0
    records = read_metrics(tmp_path / "out")
    assert all(record["mfu"] == pytest.approx(1e3 * record["tflops_per_gpu"]) for record in records)
    assert all(0 <= record["data_wait"] + record["device_wait"] < 1 for record in records)
    assert "MFU: " in output


def test_unknown_peak_has_no_mfu(train, tmp_path):
    code, output, _ = train()
    assert code == 0
    assert "MFU" not in output
    assert all("mfu" not in record and record["tflops_per_gpu"] > 0 for record in read_metrics(tmp_path / "out"))


def test_progress_line_has_share_per_gpu_and_data_wait():
    record = StepRecord(1, 2.0, 1.0, 1e-3, 8000.0, 0.1, 100, 1.0, 1000.0, 400.0, 0.4, 0.25, 0.5)
    assert _speed(record) == "8,000 tokens/s (1,000 per GPU)  400 TFLOP/s  MFU: 40.0%"
    assert _waiting(record) == "  data wait: 25%"


def test_profile_writes_trace_of_chosen_steps(train, tmp_path):
    code, output, _ = train("--train.logging.profile", "[2, 3]")
    assert code == 0
    (trace,) = (tmp_path / "out" / PROFILE_FOLDER).iterdir()
    assert trace.name == "steps_2-3_rank0.trace.json"
    assert "profile of steps 2 to 3" in output
    events = json.loads(trace.read_text())["traceEvents"]
    assert sum(event.get("name") == "Optimizer.step#AdamW.step" for event in events) == 2


def test_profile_ends_with_the_run(train, settings, tmp_path):
    del settings["train"]["max_steps"]
    settings["train"]["num_epochs"] = 0.5
    code, output, _ = train("--train.logging.profile", "[2, 10000]")
    assert code == 0
    assert "the run ends at step" in output
    assert len(list((tmp_path / "out" / PROFILE_FOLDER).iterdir())) == 1


@pytest.mark.parametrize(
    ("steps", "problem"), [("[3]", "two steps"), ("[0, 2]", "at least 1"), ("[3, 2]", "at least 1")]
)
def test_wrong_profile_is_an_error(train, steps, problem):
    code, _, error = train("--train.logging.profile", steps)
    assert code == 2
    assert problem in error


def test_profile_after_last_step_is_an_error(train):
    code, _, error = train("--train.logging.profile", "[3, 5]")
    assert code == 2
    assert "exceeds train.max_steps=4" in error
