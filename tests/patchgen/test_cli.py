"""The `patchgen` command: output, files and exit status."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys

import pytest

from opslot.patchgen.cli import main


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("OPSLOT_CACHE", str(tmp_path / "cache"))


def test_list(capsys):
    assert main(["--list"]) == 0
    out = capsys.readouterr().out
    (line,) = [line for line in out.splitlines() if line.startswith("qwen3_moe ")]
    assert "moe_experts/standard" in line


def test_generate_into_the_cache(capsys, tmp_path):
    assert main(["qwen3"]) == 0
    path = capsys.readouterr().out.strip()
    assert path.startswith(str(tmp_path / "cache"))
    assert path.endswith("models/qwen3/modeling_qwen3.py")


def test_output_directory_with_diff(capsys, tmp_path):
    assert main(["qwen3", "-o", str(tmp_path / "build"), "--diff", "-v"]) == 0
    out = capsys.readouterr().out
    assert ": slot rms_norm/standard in front of Qwen3RMSNorm.forward" in out
    assert sorted(path.name for path in (tmp_path / "build").iterdir()) == ["modeling_qwen3.diff", "modeling_qwen3.py"]
    ast.parse((tmp_path / "build/modeling_qwen3.py").read_text())
    assert "+    _opslot_rms_norm = None" in (tmp_path / "build/modeling_qwen3.diff").read_text()


def test_diff_without_output_directory_prints(capsys, tmp_path):
    assert main(["llama", "--diff"]) == 0
    assert "+        if self._opslot_rms_norm is not None:" in capsys.readouterr().out
    assert not (tmp_path / "cache").exists()


def test_dry_run_writes_nothing(capsys, tmp_path):
    assert main(["llama", "qwen3_moe", "--dry-run", "-o", str(tmp_path / "build")]) == 0
    assert capsys.readouterr().out.count("patches apply to transformers") == 2
    assert not (tmp_path / "build").exists()
    assert not (tmp_path / "cache").exists()


def test_cache_dir(capsys, tmp_path):
    assert main(["llama", "--cache-dir", str(tmp_path / "elsewhere")]) == 0
    assert capsys.readouterr().out.startswith(str(tmp_path / "elsewhere"))


def test_patch_error_is_one_message(capsys, tmp_path, monkeypatch):
    (tmp_path / "broken_patch.py").write_text(
        "from opslot.patchgen import PatchConfig\n"
        "patch = PatchConfig('transformers.models.llama.modeling_llama')\n"
        "patch.replace('LlamaMLP.forward', 'self.nothing', 'x')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["broken_patch", "-o", str(tmp_path / "build")]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("patchgen: replace `self.nothing` in LlamaMLP.forward\n")
    assert "self.act_fn(self.gate_proj(x)) * self.up_proj(x)" in captured.err
    assert "Traceback" not in captured.err
    assert not (tmp_path / "build").exists()


def test_a_module_may_import_the_patch_that_it_extends(tmp_path, monkeypatch, capsys):
    lines = "from opslot.patchgen import PatchConfig", 'config = PatchConfig("transformers.models.%s.modeling_%s")'
    (tmp_path / "sibling_patch.py").write_text("\n".join(lines) % ("qwen2", "qwen2"))
    own = [lines[0], "from sibling_patch import config as sibling", lines[1], "other = sibling"]
    (tmp_path / "own_patch.py").write_text("\n".join(own) % ("llama", "llama"))
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["own_patch", "-o", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'modeling_llama.py'}\n"


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (
            ["llamma"],
            "'llamma' is neither an architecture with slots nor an importable module\n  hint: did you mean llama",
        ),
        (["json"], "json is not a patch module\n  found: 0 PatchConfigs"),
        (["llama", "--transformers", "five"], "'five' is not a Transformers version"),
        (["llama", "-o", "/dev/null/x"], "cannot write /dev/null/x/modeling_llama.py"),
    ],
)
def test_failures_exit_1(capsys, args, problem):
    assert main(args) == 1
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        ([], "name a module, or use --all"),
        (["llama", "--all"], "not both"),
        (["--check", "--diff"], "leave out -o and --diff"),
        (["llama", "--lock", "x"], "--lock goes with"),
        (["--nonsense"], "unrecognized arguments"),
    ],
)
def test_invalid_usage_exits_2(capsys, args, problem):
    assert main(args) == 2
    assert problem in capsys.readouterr().err


def test_problem_of_several_architectures_is_printed_once(capsys, tmp_path):
    lock = tmp_path / "patchgen.lock"
    assert main(["llama", "qwen2", "qwen3", "--fix", "--lock", str(lock)]) == 0
    shared = "transformers.loss.loss_utils:ForCausalLMLoss"
    data = json.loads(lock.read_text())
    for arch in ("llama", "qwen3"):
        del data["archs"][arch]["symbols"][shared]
    data["archs"]["qwen2"]["symbols"][shared] = {data["archs"]["qwen2"]["releases"]: "absent"}
    lock.write_text(json.dumps(data))
    capsys.readouterr()
    assert main(["llama", "qwen2", "qwen3", "--check", "--lock", str(lock)]) == 1
    out = capsys.readouterr().out
    reported = [line.partition(" on transformers")[0] for line in out.splitlines() if "ForCausalLMLoss on" in line]
    assert reported == ["llama, qwen3 ForCausalLMLoss", "qwen2 ForCausalLMLoss"]
    assert out.endswith(": 2 problems\n")


def test_check_without_a_lock_raises(capsys, tmp_path):
    assert main(["llama", "--check", "--lock", str(tmp_path / "misspelled.lock")]) == 1
    assert re.search(r"no lock at .*misspelled\.lock\n  hint: .*--fix", capsys.readouterr().err)


def test_help_has_examples(capsys):
    assert main(["--help"]) == 0
    assert "patchgen --check --transformers 5.9.0 5.17.0 5.24.0" in capsys.readouterr().out


def test_runs_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "opslot.patchgen.cli", "--list"], capture_output=True, text=True, check=True
    )
    assert "qwen3" in done.stdout
