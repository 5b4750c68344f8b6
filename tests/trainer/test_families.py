"""configs/families: each is valid, its settings fit the model, and it trains a tiny checkpoint of its family."""

import json
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
import yaml

from opslot.data.multimodal.rope_positions import RopePositions
from opslot.models import build_foundation_model, trained_config
from opslot.models._multimodal.parts import parts_of
from opslot.trainer import load_config
from opslot.trainer.callbacks.writers import read_metrics
from opslot.trainer.processors import load_processor, multimodal_class
from opslot.trainer.validate import validate
from opslot.trainer.vlm import VLMTrainer
from tests.processors import config_of
from tests.trainer.test_processors import write_run

CONFIGS = Path(__file__).parents[2] / "configs"
FILES = sorted((CONFIGS / "families").glob("*.yaml"))


def test_every_family_has_a_file():
    assert {file.stem for file in FILES} == {
        "gemma3", "gemma4", "glm4v", "glm4v_moe", "internvl", "kimi_k25", "llava", "minimax_m3_vl", "mistral3",
        "pixtral", "qwen2_5_omni", "qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_omni_moe", "qwen3_vl",
        "qwen3_vl_moe",
    }  # fmt: skip


@pytest.mark.quick("qwen2_5_vl", "qwen3_vl_moe", "gemma3", "qwen2_5_omni", "qwen3_omni_moe")
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_family_configuration(file, tmp_path, monkeypatch):
    name = file.stem
    config = config_of(name)
    config.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"")
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": []}) + "\n")
    paths = {"model.model_path": tmp_path / "model", "data.train_path": tmp_path / "chats.jsonl"}
    paths["train.output_dir"] = tmp_path / "out"
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    run = load_config([str(file), *[f"--{key}={value}" for key, value in paths.items()]])
    validate(run)
    assert run.task == "vlm"
    cls = multimodal_class(config)
    model = build_foundation_model(config, architecture=cls, init_device="meta", run_device="cpu")
    parts = parts_of(model)
    assert all(parts[part] for part in [*run.train.freeze, *run.train.lr_of])
    trained = trained_config(config, cls)
    positions = RopePositions(trained, multimodal_class(trained))
    trainer = SimpleNamespace(encoder=SimpleNamespace(positions=positions))
    if run.data.packing:
        assert VLMTrainer.packing_problem(trainer, model) is None
    if run.train.ep_size > 1:
        assert any("experts" in parameter for parameter, _ in model.named_parameters())


@pytest.mark.parametrize(("name", "family"), [("sft", "qwen3"), ("vlm", "qwen3_vl"), ("omni", "qwen2_5_omni")])
def test_command_for_other_models_and_data(name, family, tmp_path):
    """The command in the comment of a demo's configuration, also after the demo ran."""
    file = CONFIGS / f"{name}_demo.yaml"
    comment = file.read_text().partition("\ntask:")[0].replace("\\\n#", "")
    _, _, path, *arguments = shlex.split(next(line for line in comment.splitlines() if "opslot train" in line)[1:])
    assert path == f"configs/{file.name}"
    given = dict(zip(arguments[::2], arguments[1::2], strict=True))
    config = config_of(family)
    config.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": []}) + "\n")
    assert given["--train.output_dir"] != yaml.safe_load(file.read_text())["train"]["output_dir"]
    given |= {"--model.model_path": str(tmp_path), "--data.train_path": str(tmp_path / "chats.jsonl")}
    given["--train.output_dir"] = str(tmp_path / "out")
    run = load_config([str(file), *(f"{key}={value}" for key, value in given.items())])
    validate(run)
    assert run.train.max_steps is None


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_family_trains(file, settings, tmp_path, train):
    """From weights with their processor to an export that Transformers loads, with the file's own settings."""
    name = file.stem
    samples = write_run(name, settings, tmp_path)
    cls = getattr(transformers, multimodal_class(transformers.AutoConfig.from_pretrained(tmp_path)))
    cls._from_config(transformers.AutoConfig.from_pretrained(tmp_path)).save_pretrained(tmp_path)
    if name == "qwen2_5_omni":
        # The voices, which Transformers reads with the talker.
        torch.save({"Chelsie": {}}, tmp_path / "spk_dict.pt")
    given = yaml.safe_load(file.read_text())
    given["model"]["model_path"] = str(tmp_path)
    given["data"] |= {key: settings["data"][key] for key in ("train_path", "cache_dir")}
    # The video of an omni model has up to 4268 tokens.
    given["data"] |= {"max_seq_len": 5120, "max_tokens_per_batch": 5120, "num_workers": 1, "on_bad_sample": "error"}
    given["train"] |= settings["train"] | {"global_batch_size": 1, "max_steps": 2, "warmup_steps": 0}
    if "ep_size" in given["train"]:
        given["train"]["ep_size"] = 1
    settings.clear()
    settings |= given
    code, out, error = train()
    assert code == 0, error
    assert f"in {len(samples)} samples" in out
    curve = [record["loss"] for record in read_metrics(tmp_path / "out")]
    assert curve[1] < curve[0]
    assert type(load_processor(tmp_path / "out" / "hf")).__name__
    reloaded = cls.from_pretrained(tmp_path / "out" / "hf")
    assert any(not torch.equal(p, q) for p, q in zip(reloaded.parameters(), cls.from_pretrained(tmp_path).parameters()))
