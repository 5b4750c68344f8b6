"""Runs whose model and data are on the Hugging Face hub."""

import json

import pytest
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

import opslot
from opslot.checkpoint.adapters import has_adapters, load_adapter
from opslot.cli import main
from tests.trainer.runs import losses


@pytest.fixture
def base(hub, settings, model_folder, text_folder, tmp_path):
    """A folder of the model org/model of the hub, from which `settings` starts, with the texts of org/texts."""
    folder = tmp_path / "base"
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_folder)).save_pretrained(folder)
    for file in model_folder.glob("tokenizer*"):
        (folder / file.name).write_bytes(file.read_bytes())
    hub.repositories = {"models/org/model": folder, "datasets/org/texts": text_folder}
    settings["model"] = {"model_path": "org/model"}
    settings["data"]["train_path"] = "hf://datasets/org/texts/*.txt"
    return folder


def test_the_same_as_local_files(train, settings, base, text_folder, tmp_path):
    code, _, err = train()
    assert code == 0, err
    assert yaml.safe_load((tmp_path / "out/config.yaml").read_text())["model"]["model_path"] == "org/model"
    settings["model"]["model_path"] = str(base)
    settings["data"]["train_path"] = f"{text_folder}/*.txt"
    assert train("--train.output_dir", str(tmp_path / "local"))[0] == 0
    assert losses(tmp_path / "out") == losses(tmp_path / "local")


def test_weights_and_data_are_not_downloaded_for_an_invalid_run(train, settings, hub, base):
    assert train("--train.lr", "-1")[0] == 2
    assert "config.json" in hub.downloads
    assert not [name for name in hub.downloads if name == "model.safetensors" or name.endswith(".txt")]


def test_weights_are_not_downloaded_for_an_invalid_destination(hub, base, tmp_path, capsys):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/model"}))
    assert main(["merge", str(adapter), str(adapter)]) == 2
    assert "exists and is not an empty folder" in capsys.readouterr().err
    assert hub.downloads == []


def test_weights_are_not_downloaded_for_invalid_options(hub, base, capsys):
    assert main(["generate", "org/model", "--prompt", "1 and", "--image", "missing.png"]) == 2
    assert "--image: missing.png is not a file" in capsys.readouterr().err
    assert "model.safetensors" not in hub.downloads


def test_bisect_reads_the_weights(hub, base, capsys):
    assert main(["bisect", "org/model", "--length", "8", "--device", "cpu"]) == 0
    assert "model.safetensors" in hub.downloads


def test_adapters_name_the_model_of_the_hub(train, settings, hub, base, tmp_path):
    settings["model"]["model_path"] = "org/model@main"
    code, _, err = train("--lora.r", "2")
    assert code == 0, err
    adapter = tmp_path / "out/hf"
    saved = json.loads((adapter / "adapter_config.json").read_text())
    assert (saved["base_model_name_or_path"], saved["revision"]) == ("org/model", "main")
    assert main(["generate", str(adapter), "--prompt", "1 and", "--max-new-tokens", "2", "--device", "cpu"]) == 0
    hub.repositories["models/org/adapter"] = adapter
    assert main(["merge", "org/adapter", str(tmp_path / "merged")]) == 0
    AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    model = opslot.build_foundation_model("org/model", weights_path="org/model")
    load_adapter(model, "org/adapter")
    assert has_adapters(model)


def test_model_without_safetensors_raises_before_data_is_downloaded(train, hub, base):
    (base / "model.safetensors").rename(base / "pytorch_model.bin")
    code, _, err = train()
    assert code == 2
    assert "org/model has no safetensors that Transformers reads\n    found: pytorch_model.bin" in err
    assert hub.downloads == []


def test_merge_expands_the_home_folder(train, base, tmp_path, monkeypatch):
    assert train("--lora.r", "2")[0] == 0
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(["merge", str(tmp_path / "out/hf"), "~/merged"]) == 0
    assert (tmp_path / "merged/model.safetensors").is_file()


@pytest.mark.parametrize("command", ["explain", "discover", "bench"])
def test_commands_take_models_of_the_hub(base, hub, capsys, command):
    options = {"bench": ["--device", "cpu", "--layers", "1", "--length", "8", "--steps", "1", "--steps-only"]}
    arguments = ["--model", "org/model"] if command == "bench" else ["org/model"]
    assert main([command, *arguments, *options.get(command, [])]) == 0
    assert "model.safetensors" not in hub.downloads
