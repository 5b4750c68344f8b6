"""Every example runs in its small form, and opslot's kernels give the losses that the trainer has without them."""

import importlib
import math
import sys
from pathlib import Path

import pytest

pytest.importorskip("trl")

EXAMPLES = Path(__file__).parents[2] / "examples"
CASES = [
    ("transformers_trainer", []),
    ("accelerate_loop", []),
    ("trl_sft", []),
    ("trl_sft", ["--lora", "--packing"]),
    ("trl_dpo", []),
]


@pytest.fixture
def run(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)

    def run(name, *arguments):
        return importlib.import_module(name).main(["--max-steps", "3", *arguments])

    yield run
    for name in ("common", *(path.stem for path in EXAMPLES.glob("*.py"))):
        sys.modules.pop(name, None)


@pytest.mark.quick("accelerate_loop-*", "transformers_trainer-*", "trl_sft-", "trl_dpo-")
@pytest.mark.parametrize(
    ("name", "arguments"), CASES, ids=lambda value: value if isinstance(value, str) else "-".join(value)
)
def test_losses_equal_those_without_opslot(run, name, arguments):
    expected = run(name, "--kernels", "none", *arguments)
    found = run(name, *arguments)
    assert len(found) == 3
    assert found == pytest.approx(expected, rel=1e-5)


def test_grpo_trains(run, tmp_path):
    assert len(run("trl_grpo", "--output", str(tmp_path))) == 3
    assert (tmp_path / "model.safetensors").is_file()


def test_dpo_loop_equals_transformers_own_code(run, tmp_path):
    expected = run("dpo_loop", "--kernels", "eager")
    found = run("dpo_loop", "--output", str(tmp_path))
    assert found == pytest.approx(expected, rel=1e-5)
    assert found[2] < found[0] == pytest.approx(math.log(2))
    assert (tmp_path / "adapter_model.safetensors").is_file()


def test_rl_loop_equals_transformers_own_code(run, tmp_path):
    expected = run("rl_loop", "--kernels", "eager")
    found = run("rl_loop", "--output", str(tmp_path))
    assert len(found) == 3
    assert found == pytest.approx(expected, rel=1e-4)
    assert found[-1] != pytest.approx(found[0], rel=1e-3)
    assert (tmp_path / "model.safetensors").is_file()


def rl_loop_of_a_rank(output):
    sys.path.insert(0, str(EXAMPLES))
    return importlib.import_module("rl_loop").main(["--max-steps", "2", "--output", output])


@pytest.mark.slow
def test_rl_loop_on_two_processes(ranks, tmp_path):
    first, second = ranks.run(rl_loop_of_a_rank, str(tmp_path))
    assert len(first) == 2
    assert first == second
    assert (tmp_path / "model.safetensors").is_file()


def test_every_example_is_listed_and_tested():
    files = {path.stem for path in EXAMPLES.glob("*.py")} - {"common"}
    readme = (EXAMPLES / "README.md").read_text()
    assert all(f"`{name}.py`" in readme for name in files)
    assert files == {name for name, _ in CASES} | {"trl_grpo", "dpo_loop", "rl_loop"}
