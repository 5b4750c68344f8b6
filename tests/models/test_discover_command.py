"""opslot discover."""

from __future__ import annotations

import importlib
import json

import pytest

from opslot.cli import main
from opslot.patchgen.engine import generate
from opslot.patchgen.fingerprint import fingerprint
from opslot.patchgen.materialization import require_patch
from opslot.patchgen.source import installed_release
from opslot.patchgen.writing import patch_source
from opslot.verify import CheckOutcome
from tests.own_code import ship


def test_command(tmp_path, capsys):
    assert main(["discover", "mistral"]) == 0
    shown = capsys.readouterr().out
    assert "MistralRMSNorm " in shown
    assert "skipped" not in shown

    (tmp_path / "config.json").write_text('{"model_type": "gemma3_text"}')
    assert main(["discover", str(tmp_path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["architecture"] == "gemma3"
    assert {"symbol": "Gemma3RMSNorm", "op": "rms_norm/weight_offset"} in report["matches"]
    assert {"symbol": "Gemma3Attention", "op": "attention/causal"} in report["matches"]
    assert main(["discover", "doge", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    (attention,) = [row for row in report["skipped"] if row["op"] == "attention"]
    assert attention["reason"] == "changes the attention mask"
    assert report["problem"] == ""

    assert main(["discover", "xlm"]) == 1
    assert "no code that opslot has a form of" in capsys.readouterr().out


def test_fingerprints_are_those_that_rows_of_forms_take(capsys):
    assert main(["discover", "doge", "--fingerprints", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["fingerprints"]
    assert found.keys() == {"DogeAttention.forward", "DogeAttention.prepare_dynamic_mask", "load_balancing_loss_func"}
    upstream = installed_release().module("transformers.models.doge.modeling_doge")
    assert found == {name: fingerprint(upstream.require(name).text) for name in found}

    assert main(["discover", "doge", "--fingerprints"]) == 0
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [list(row) for row in found.items()] == shown[-3:]

    assert main(["discover", "--all", "--fingerprints"]) == 2
    assert "--fingerprints and -o are for one architecture" in capsys.readouterr().err


def test_command_verifies_a_tiny_model(capsys):
    assert main(["discover", "qwen3", "--checks", "eager,auto"]) == 0
    output = capsys.readouterr().out
    assert "qwen3: passed\n" in output
    assert "loss and gradients equal Transformers' bit for bit" in output


@pytest.mark.parametrize(
    ("model_type", "arch"), [("internlm3", "llama"), ("sarvam_mla", "deepseek_v3"), ("data2vec-text", "data2vec_text")]
)
def test_command_reads_models_that_are_not_in_a_file_of_their_model_type(model_type, arch, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    for given in (model_type, str(tmp_path)):
        assert main(["discover", given, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["architecture"] == arch
    if arch.startswith(model_type.replace("-", "_")):
        assert main(["discover", arch, "--checks", "eager"]) == 0
    assert main(["discover", model_type, "--checks", "eager"]) == 0
    assert f"{model_type}: passed\n" in capsys.readouterr().out


def test_command_prints_matches_and_each_check_before_the_next(capsys, monkeypatch):
    printed = {}

    def outcome(self, check):
        printed[check] = capsys.readouterr().out
        return CheckOutcome(check, "passed", f"detail of {check}\nmore")

    monkeypatch.setattr("opslot.verify.architecture.ConfigChecks.outcome", outcome)
    assert main(["discover", "qwen3", "--checks", "eager,auto"]) == 0
    assert "Qwen3RMSNorm " in printed["eager"]
    assert printed["eager"].endswith("checks on a model with random weights:\n")
    assert printed["auto"] == "eager       passed       detail of eager\n"
    assert capsys.readouterr().out == "auto        passed       detail of auto\nqwen3: passed\n"


def test_command_verify_fails_with_a_reason(capsys):
    assert main(["discover", "kyutai_speech_to_text", "--verify"]) == 1
    assert "kyutai_speech_to_text: failed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("file", "model_type"), [("blip_text", "blip_text_model"), ("maskformer_swin", "maskformer-swin")]
)
def test_command_verify_states_why_one_of_several_files_is_not_checked(file, model_type, capsys):
    assert main(["discover", file, "--verify"]) == 1
    assert f"Transformers has no language model of model_type '{model_type}'" in capsys.readouterr().out


@pytest.mark.quick("qwen3_moe", "longcat_flash")
@pytest.mark.parametrize(
    "arch", ["qwen3_moe", "gemma2", "glm4v", "deepseek_v3", "llama4", "longcat_flash", "qwen2_5_omni"]
)
def test_written_patch_file_generates_the_same_module(arch, tmp_path, monkeypatch, capsys):
    file = tmp_path / f"written_{arch}.py"
    assert main(["discover", arch, "-o", str(file)]) == 0
    monkeypatch.syspath_prepend(tmp_path)
    written = importlib.import_module(file.stem).patch
    assert not written.discover
    wanted = generate(require_patch(arch), installed_release())
    assert generate(written, installed_release()) == wanted
    assert patch_source(written) == file.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no architecture named"),
        (["mistral", "--all"], "mistral and --all exclude each other"),
        (
            ["--all", "--verify"],
            "--verify, --checks, --device, --dtype, --fingerprints and -o are for one architecture",
        ),
        (["mistrall"], "has no architecture 'mistrall'\n  hint: did you mean mistral"),
        (["nougat"], "has no model class for model_type 'nougat'"),
        (["{folder}"], "is not a config.json with a model_type"),
    ],
)
def test_invalid_usage_of_the_command_raises(arguments, message, tmp_path, capsys):
    assert main(["discover", *(a.format(folder=tmp_path) for a in arguments)]) == 2
    assert message in capsys.readouterr().err


def test_command_reads_code_outside_transformers(tmp_path, modules_cache, capsys):
    folder = ship("finch", tmp_path / "finch")
    assert main(["discover", str(folder)]) == 2
    assert "give --trust-remote-code" in capsys.readouterr().err
    arguments = ["discover", str(folder), "--trust-remote-code", "--checks", "eager,auto,packed,fsdp,ep,checkpoint"]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "FinchExperts " in shown
    assert "FinchForCausalLM " in shown
    assert shown.count("passed") == 7

    assert main(["discover", "tests.own_code.modeling_wren", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["architecture"] == "tests.own_code.modeling_wren"
    assert {"symbol": "WrenMLP", "op": "swiglu_mlp/standard"} in report["matches"]
    assert {row["symbol"] for row in report["skipped"]} == {"WrenAttention", "apply_rotary_pos_emb"}
