"""The scripts of benchmarks/."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from opslot.bench.result import StepRow, read
from opslot.verify.random_model import random_model
from opslot.verify.tiny import tiny_config

SCRIPTS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize(
    "script",
    [
        *(path for path in sorted(SCRIPTS.glob("*.py")) if "__main__" in path.read_text()),
        SCRIPTS / "parallel_workers" / "opslot_worker.py",
    ],
    ids=lambda script: script.stem,
)
def test_script_imports(script, monkeypatch):
    monkeypatch.syspath_prepend(script.parent)
    spec = importlib.util.spec_from_file_location(script.stem, script)
    module = importlib.util.module_from_spec(spec)
    # Data classes look their module up.
    monkeypatch.setitem(sys.modules, script.stem, module)
    spec.loader.exec_module(module)
    assert callable(module.main)
    assert module.__doc__


@pytest.mark.slow
def test_parallel_writes_rows_of_one_run_with_the_losses_of_each_other(tmp_path):
    output = tmp_path / "parallel.json"
    command = [sys.executable, str(SCRIPTS / "parallel.py"), "dense-fsdp+reshard_after_forward=False"]
    options = ["--gpus", "2", "--layers", "1", "--steps", "1", "--shrink", "32", "--output", str(output)]
    done = subprocess.run([*command, "moe-fsdp", "moe-ep", *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (run,) = read(output).runs
    assert [(row.model, row.implementation, row.setup, row.check) for row in run.steps] == [
        (
            "qwen3_8b_width",
            "opslot (reshard_after_forward=False)",
            "fsdp 2",
            "unchecked: nothing else trained the same",
        ),
        ("qwen3_30b_a3b_width", "opslot", "fsdp 2", "ok"),
        ("qwen3_30b_a3b_width", "opslot", "fsdp 2, ep 2", "ok"),
    ]
    assert all(row.valid and row.kernels for row in run.steps)


def test_rows_of_parallel_training_are_compared_with_another_library(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    from parallel import check_losses

    def row(name, loss, **more):
        return StepRow("tiny", name, 2, 16, gpus=4, tokens_per_s=1.0, first_loss=loss, last_loss=loss, **more)

    rows = [row("opslot", 11.0), row("opslot (option=1)", 10.0), row("VeOmni", 11.0), row("VeOmni", None, error="it")]
    assert [found.check for found in check_losses(rows)] == [
        "ok",
        "WRONG: a loss differs by 9.1% from VeOmni",
        "ok",
        "",
    ]


def test_every_library_draws_the_same_weights_however_they_are_sharded(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS / "parallel_workers")
    from workload import draw_weights

    config = tiny_config("qwen3_moe")
    whole, shards = (random_model(config) for _ in range(2))
    draw_weights(whole, config)
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2,))
        for module in shards.modules():
            for name, parameter in [*module.named_parameters(recurse=False)]:
                if "experts" in type(module).__name__.lower():
                    # The rank's experts, of which it holds half of each.
                    parameter = parameter.chunk(2)[1]
                shard = distribute_tensor(parameter.detach(), mesh, [Shard(parameter.ndim - 1)], src_data_rank=None)
                setattr(module, name, torch.nn.Parameter(shard))
        draw_weights(shards, config)
        for (name, found), expected in zip(shards.named_parameters(), whole.parameters(), strict=True):
            expected = expected.chunk(2)[1] if ".experts." in name else expected
            assert torch.equal(found.to_local(), expected.chunk(2, -1)[1]), name
    finally:
        dist.destroy_process_group()
