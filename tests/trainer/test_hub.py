"""Runs whose model and data are on the Hugging Face hub."""

import json
import shutil

import pytest
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

import opslot
from opslot._base.hub import _downloaded_data, _downloaded_model, require_safetensors
from opslot.checkpoint.adapters import has_adapters, load_adapter
from opslot.cli import main
from opslot.trainer import load_config
from opslot.trainer.callbacks.base import Callback
from tests.hub import COMMIT, NEWER_COMMIT, read_from
from tests.multimodal import write_model, write_samples
from tests.trainer.runs import curve, losses, run_config, trainer_of


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
    recorded = load_config(tmp_path / "out/config.yaml")
    assert recorded.model.model_path == f"org/model@{COMMIT}"
    assert recorded.data.train_path == f"hf://datasets/org/texts@{COMMIT}/*.txt"
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
    assert (saved["base_model_name_or_path"], saved["revision"]) == ("org/model", COMMIT)
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
    assert f"org/model@{COMMIT} has no safetensors that Transformers reads\n    found: pytorch_model.bin" in err
    assert hub.downloads == []


def test_merge_expands_the_home_folder(train, base, tmp_path, monkeypatch):
    assert train("--lora.r", "2")[0] == 0
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(["merge", str(tmp_path / "out/hf"), "~/merged"]) == 0
    assert (tmp_path / "merged/model.safetensors").is_file()


@pytest.mark.parametrize("command", ["explain", "discover", "bench"])
def test_commands_take_models_of_the_hub(base, hub, capsys, command):
    sizes = ["--device", "cpu", "--layers", "1", "--length", "8", "--steps", "1"]
    options = ["--steps-only", "--implementations", "opslot", *sizes] if command == "bench" else []
    arguments = ["--model", "org/model"] if command == "bench" else ["org/model"]
    assert main([command, *arguments, *options]) == 0
    assert "model.safetensors" not in hub.downloads


@pytest.fixture
def newer(base, text_folder, tmp_path):
    """Folders of another model and other texts, for newer commits."""
    model, texts = tmp_path / "newer_model", tmp_path / "newer_texts"
    shutil.copytree(base, model)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base)).save_pretrained(model)
    texts.mkdir()
    for file in text_folder.iterdir():
        (texts / file.name).write_text(file.read_text()[::-1])
    return model, texts


@pytest.fixture
def stopped(settings, hub, base, newer, train, tmp_path):
    """Losses of a whole run; another run of it was stopped before main of its model and of its data moved."""
    settings["train"] |= {"checkpoint.save_steps": 2, "checkpoint.resume_from": "latest", "lr_scheduler": "constant"}
    assert train("--train.output_dir", str(tmp_path / "whole"))[0] == 0

    class Stop(Callback):
        def on_step_end(self, trainer, record):
            if record.step == 3:
                raise KeyboardInterrupt

    trainer = trainer_of(settings, tmp_path)
    trainer.callbacks.append(Stop())
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    hub.move("models/org/model", newer[0])
    hub.move("datasets/org/texts", newer[1])
    for function in (require_safetensors, _downloaded_model, _downloaded_data):
        function.cache_clear()
    return curve(tmp_path / "whole")


@pytest.mark.parametrize("offline", [False, True])
def test_resumed_run_reads_the_same_commits(train, stopped, tmp_path, monkeypatch, offline):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
    code, out, err = train()
    assert code == 0, err
    assert "changed since that checkpoint: model" not in out
    assert "changed since that checkpoint: data" not in out
    assert curve(tmp_path / "out") == stopped
    assert load_config(tmp_path / "out/config.yaml").model.model_path == f"org/model@{COMMIT}"


def test_recorded_configuration_resumes_too(train, stopped, tmp_path):
    """And its checkpoints keep the commits of the names that the run was started with."""
    recorded = str(tmp_path / "out/config.yaml")
    last = trainer_of(yaml.safe_load((tmp_path / "out/config.yaml").read_text()), tmp_path)
    last.train()
    assert curve(tmp_path / "out") == stopped
    assert load_config(recorded).model.model_path == f"org/model@{COMMIT}"
    code, out, err = train("--train.max_steps", "5")
    assert code == 0, err
    assert "changed since that checkpoint: train.max_steps" in out
    assert "changed since that checkpoint: model" not in out


def test_other_revision_that_is_named_is_read(train, stopped, tmp_path):
    code, out, err = train("--model.model_path", "org/model@main")
    assert code == 0, err
    change = f"changed since that checkpoint: model.model_path: org/model@{COMMIT} -> org/model@{NEWER_COMMIT}"
    assert change in out
    assert "data.train_path" not in out
    newer_data = ["--data.train_path", "hf://datasets/org/texts@main/*.txt", "--train.max_steps", "5"]
    code, _, err = train(*newer_data)
    assert code == 2
    assert "data.allow_changes" in err
    code, _, err = train(*newer_data, "--data.allow_changes", "true")
    assert code == 0, err
    # A name without a revision is not another one.
    code, _, err = train("--train.max_steps", "6")
    assert code == 0, err
    assert load_config(tmp_path / "out/config.yaml").data.train_path == f"hf://datasets/org/texts@{NEWER_COMMIT}/*.txt"


def run_from_hub(constants, file):
    with read_from(constants):
        return run_config(file)


@pytest.mark.usefixtures("base")
def test_branch_that_moves_while_ranks_start_is_read_once(ranks, settings, hub, newer, tmp_path):
    hub.move("models/org/model", newer[0], after=1)
    hub.move("datasets/org/texts", newer[1], after=1)
    settings["train"]["max_steps"] = 2
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(settings))
    assert ranks.run(run_from_hub, hub.constants, str(file), timeout=90) == [0, 0]
    recorded = load_config(tmp_path / "out/config.yaml")
    assert recorded.model.model_path == f"org/model@{COMMIT}"
    snapshots = sorted((tmp_path / "hub").glob("*/snapshots/*"))
    assert [folder.name for folder in snapshots] == [COMMIT, COMMIT]
    assert hub.downloads.count("model.safetensors") == 1


def test_commit_that_is_not_found_raises(train, settings, base, monkeypatch):
    monkeypatch.setattr("opslot.trainer.commits.commit_of", lambda name: None)
    code, _, err = train()
    assert code == 2
    assert "model.model_path: the commit of org/model was not found" in err


@pytest.mark.parametrize(("workers", "data"), [(0, "of_hub"), (1, "of_hub"), (0, "local")])
def test_images_beside_data_of_the_hub(train, settings, hub, tmp_path, workers, data):
    settings["task"] = "vlm"
    samples = write_samples(tmp_path / "samples").parent
    hub.repositories = {"models/org/vlm": write_model(tmp_path / "vlm"), "datasets/org/images": samples}
    settings["model"] = {"config_path": "org/vlm"}
    settings["data"] |= {"train_path": "hf://datasets/org/images/*.jsonl", "max_seq_len": 96, "num_workers": workers}
    if data == "local":
        (samples / "chat.jsonl").rename(tmp_path / "chat.jsonl")
        settings["data"] |= {"train_path": str(tmp_path / "chat.jsonl"), "media_dir": "hf://datasets/org/images"}
    settings["train"] |= {"global_batch_size": 2, "lr": 1e-3}
    code, _, err = train()
    assert code == 0, err
    images = {str(file.relative_to(samples)) for file in samples.rglob("*.png")}
    assert images
    assert images <= set(hub.downloads)
    if data == "local":
        assert load_config(tmp_path / "out/config.yaml").data.media_dir == f"hf://datasets/org/images@{COMMIT}/"
