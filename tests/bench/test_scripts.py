"""The scripts of benchmarks/."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from opslot.bench.result import read

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
def test_parallel_writes_rows_of_one_run(tmp_path):
    output = tmp_path / "parallel.json"
    command = [sys.executable, str(SCRIPTS / "parallel.py"), "dense-fsdp+reshard_after_forward=False", "moe-fsdp"]
    options = ["--gpus", "1", "--layers", "1", "--steps", "1", "--shrink", "32", "--output", str(output)]
    done = subprocess.run([*command, *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (run,) = read(output).runs
    assert [(row.model, row.implementation, row.gpus) for row in run.steps] == [
        ("qwen3_8b_width", "opslot (reshard_after_forward=False)", 1),
        ("qwen3_30b_a3b_width", "opslot", 1),
    ]
    assert all(row.valid and row.kernels for row in run.steps)
