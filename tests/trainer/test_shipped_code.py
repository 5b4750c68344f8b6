"""`opslot train` with model classes that ship with a checkpoint."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from opslot.cli import main
from tests.own_code import ship

SIZES = {"vocab_size": 260, "intermediate_size": 32}


@pytest.mark.parametrize(("name", "module"), [("sparrow", "RootScale"), ("finch", "FinchExperts")])
def test_trains_on_packed_documents_and_exports_the_code(
    train, settings, tmp_path, tokenizer, modules_cache, name, module
):
    folder = ship(name, tmp_path / name, **SIZES)
    tokenizer.save_pretrained(folder)
    settings["model"] = {"config_path": str(folder), "trust_remote_code": True}
    settings["train"]["max_steps"] = 8
    code, out, err = train()
    assert code == 0, err
    assert module in out
    losses = [json.loads(line)["loss"] for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert losses[-1] < 0.9 * losses[0]
    exported = tmp_path / "out" / "hf"
    assert (exported / f"modeling_{name}.py").read_text() == (folder / f"modeling_{name}.py").read_text()
    loaded, info = AutoModelForCausalLM.from_pretrained(exported, trust_remote_code=True, output_loading_info=True)
    assert not any(info.values()), info
    assert torch.isfinite(loaded(torch.arange(8)[None]).logits).all()


def test_packing_raises_for_masks_of_a_models_own(train, settings, tmp_path, tokenizer, modules_cache):
    folder = ship("wren", tmp_path / "wren", **SIZES)
    tokenizer.save_pretrained(folder)
    settings["model"] = {"config_path": str(folder), "trust_remote_code": True}
    code, _, err = train()
    assert code == 2
    assert "WrenAttention calls scaled_dot_product_attention, which may mix tokens" in err
    settings["data"]["packing"] = False
    code, _, err = train()
    assert code == 0, err


def test_adapters_are_merged_as_the_run_says(train, settings, tmp_path, tokenizer, modules_cache, capsys):
    folder = ship("sparrow", tmp_path / "sparrow", **SIZES)
    tokenizer.save_pretrained(folder)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    model = AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    model.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    settings["model"] = {"model_path": str(tmp_path / "base"), "trust_remote_code": True}
    settings["lora"] = {"r": 2, "target_modules": ["gate_proj", "up_proj"]}
    settings["train"]["max_steps"] = 1
    code, out, err = train()
    assert code == 0, err
    command = f"opslot merge {tmp_path / 'out' / 'hf'} DESTINATION --trust-remote-code"
    assert f"merge it with: {command}" in out
    assert 'out/hf", trust_remote_code=True)' in out
    arguments = command.replace("DESTINATION", str(tmp_path / "merged")).split()[1:]
    assert main(arguments[:-1]) == 2
    assert "give --trust-remote-code" in capsys.readouterr().err
    assert main(arguments) == 0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "merged", trust_remote_code=True).config.vocab_size == 260


@pytest.mark.parametrize("command", ["explain", "bisect"])
def test_commands_that_read_the_code(command, tmp_path, modules_cache, capsys):
    folder = str(ship("sparrow", tmp_path / "sparrow", **SIZES))
    assert main([command, folder]) == 2
    assert "give --trust-remote-code" in capsys.readouterr().err
    assert main([command, folder, "--trust-remote-code"]) == 0
