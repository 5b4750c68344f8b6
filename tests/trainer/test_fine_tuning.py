"""Fine-tuning settings in full runs: ranks, intermediate exports, optimizers, and invalid settings."""

import json
import shlex
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from opslot._base.device import DeviceFacts
from opslot.cli import main
from opslot.trainer import load_config
from tests.chat import write_chat_model, write_chats
from tests.trainer.runs import losses, run_config

SIZES = {"fsdp": {}, "sp": {"sp_size": 2}, "ep": {"ep_size": 2}}


@pytest.fixture
def chats(settings, model_folder, tmp_path, tokenizer):
    """Settings of task sft on conversations of different lengths, and a Qwen3-MoE with a chat template."""
    model = tmp_path / "chat_model"
    write_chat_model(model, tokenizer, json.loads((model_folder / "config.json").read_text()))
    file = tmp_path / "chat.jsonl"
    write_chats(file)
    settings["data"] |= {"train_path": str(file), "max_seq_len": 64}
    return settings | {"task": "sft", "model": {"config_path": str(model)}}


def test_documented_path_to_a_checkpoint(chats, hub, tmp_path, monkeypatch, capsys):
    """The commands of docs/fine_tuning.md from a model of the hub to answers, on a small one."""
    text = (Path(__file__).parents[2] / "docs" / "fine_tuning.md").read_text()
    commands = text.split("## From nothing to a fine-tuned checkpoint")[1].split("```bash")[1].split("```")[0]
    lines = [shlex.split(line, comments=True) for line in commands.splitlines() if line]
    assert len(lines) < 10
    monkeypatch.chdir(tmp_path)
    base, config = tmp_path / "remote", Path(chats["model"]["config_path"])
    hub.repositories["models/Qwen/Qwen3-0.6B"] = base
    shutil.copytree(config, base)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config)).save_pretrained(base)
    small = ["--train.max_steps", "2", "--data.max_seq_len", "64", "--data.cache_dir", str(tmp_path / "cache")]
    for name, *arguments in lines:
        if name == "opslot":
            extra = {"train": small, "generate": ["--max-new-tokens", "2"]}.get(arguments[0], [])
            assert main([part.replace("chats.jsonl", "chat.jsonl") for part in arguments] + extra) == 0
    assert "merge it with: opslot merge run/hf DESTINATION" in capsys.readouterr().out
    assert [arguments[1] for arguments in lines if arguments[0] == "opslot"] == ["train", "merge", "generate"]
    AutoModelForCausalLM.from_pretrained("chat-model")


def test_exported_model_stops_where_the_template_ends_an_answer(chats, settings, train, tmp_path):
    """The generation config is the checkpoint's, with the token that ends a turn of the chat template."""
    folder = Path(chats["model"]["config_path"])
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    generation = {"eos_token_id": [3, 4], "do_sample": True, "temperature": 0.6}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    settings |= chats | {"model": {"model_path": str(folder)}}
    assert train()[0] == 0
    exported = json.loads((Path(settings["train"]["output_dir"]) / "hf" / "generation_config.json").read_text())
    assert exported["eos_token_id"] == [3, 4, tokenizer.eos_token_id]
    assert exported["temperature"] == 0.6
    adapters, merged = f"{settings['train']['output_dir']}-lora", tmp_path / "merged"
    assert train("--train.output_dir", adapters, "--lora.r", "2")[0] == 0
    assert main(["merge", f"{adapters}/hf", str(merged)]) == 0
    assert json.loads((merged / "generation_config.json").read_text()) == exported
    (folder / "generation_config.json").write_text(json.dumps(generation | {"do_sample": False}))
    code, out, _ = train("--train.output_dir", f"{settings['train']['output_dir']}-2")
    assert code == 0
    assert "generation_config.json is not exported, since it is invalid" in out


def test_few_packed_steps_are_a_warning(chats, settings, train):
    settings |= chats
    del settings["train"]["max_steps"]
    _, out, _ = train()
    assert "; 2 steps of 256 tokens" in out
    assert "warning: the run has few steps, since each packs about 12 documents" in out
    _, out, _ = train("--data.packing", "false", "--train.output_dir", f"{settings['train']['output_dir']}-padded")
    assert "few steps" not in out
    # Not of packing.
    _, out, _ = train("--train.num_epochs", "0.1", "--train.output_dir", f"{settings['train']['output_dir']}-short")
    assert "; 1 step of 256 tokens" in out
    assert "few steps" not in out


@pytest.mark.quick("fsdp")
@pytest.mark.parametrize("axis", list(SIZES))
def test_sft_on_two_processes_equals_one(ranks, chats, tmp_path, axis):
    def write(name, sizes):
        file = tmp_path / f"{name}.yaml"
        train = chats["train"] | {"output_dir": str(tmp_path / name), "micro_batch_size": 1} | sizes
        file.write_text(yaml.safe_dump(chats | {"train": train}))
        return str(file)

    assert run_config(write("one", {})) == 0
    assert ranks.run(run_config, write("two", SIZES[axis])) == [0, 0]
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


def test_intermediate_exports_load_in_transformers(settings, train, tmp_path):
    settings["train"]["checkpoint.export_steps"] = 2
    assert train()[0] == 0
    exports = sorted(path.name for path in (tmp_path / "out").glob("hf*"))
    assert exports == ["hf", "hf_step_00000002"]
    models = [AutoModelForCausalLM.from_pretrained(tmp_path / "out" / name) for name in exports]
    weights = [model.lm_head.weight for model in models]
    assert weights[0].shape == weights[1].shape
    assert not torch.equal(*weights)


def test_changed_settings_are_printed_on_resume(settings, train):
    settings["train"] |= {"max_steps": 2, "checkpoint.save_steps": 1}
    assert train()[0] == 0
    settings["train"] |= {
        "max_steps": 3,
        "checkpoint.resume_from": "latest",
        "activation_checkpointing": "selective",
        "checkpoint.export_steps": 9,
        "optimizer": {"name": "adamw_torch", "groups": [{"params": "*norm*", "lr": 0.1}]},
    }
    code, out, err = train()
    assert (code, err) == (0, "")
    for name in ("activation_checkpointing", "checkpoint.export_steps", "optimizer.name", "optimizer.groups"):
        assert f"changed since that checkpoint: train.{name}" in out


def test_resume_with_the_state_of_another_optimizer_raises(settings, train):
    settings["train"] |= {"max_steps": 2, "checkpoint.save_steps": 1}
    assert train()[0] == 0
    settings["train"] |= {"max_steps": 3, "checkpoint.resume_from": "latest", "optimizer": {"name": "muon"}}
    code, _, err = train()
    assert code == 2
    assert "was saved with train.optimizer.name=adamw" in err


@pytest.mark.parametrize("name", ["auto", "triton"])
def test_kernel_of_the_optimizer_is_written(settings, train, tmp_path, name):
    settings["train"] |= {"max_steps": 1}
    settings["model"]["ops_implementation"] = {"adamw_implementation": name}
    code, _, err = train()
    assert (code, err) == (0, "")
    table = (tmp_path / "out" / "kernels.txt").read_text()
    reasons = {"auto": "eager (no usable kernel was measured faster", "triton": "triton ("}
    assert f"\noptimizer: adamw/standard runs {reasons[name]}" in table


@pytest.mark.parametrize("name", ["adamw_torch", "muon"])
def test_kernel_of_another_optimizer_raises(settings, train, name):
    settings["model"]["ops_implementation"] = {"adamw_implementation": "triton"}
    settings["train"]["optimizer"] = {"name": name}
    code, _, err = train()
    assert code == 2
    assert f"adamw_implementation='triton' is a kernel of train.optimizer.name: adamw, found {name}" in err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation_offload": True}, "set train.activation_checkpointing to full or selective"),
        ({"activation_checkpointing": "half"}, "expected one of none, full, selective"),
        ({"optimizer": "muon"}, "train.optimizer is a section, found 'muon'; set its fields, such as"),
        ({"optimizer": {"momentum": 0.5}}, "train.optimizer.momentum is a setting of muon"),
        ({"optimizer": {"name": "muon", "momentum": 1.0}}, "train.optimizer.momentum=1.0 must be in [0, 1)"),
        ({"optimizer": {"groups": [{"lr": 0.1}]}}, "groups[0]: params must be a glob"),
        ({"optimizer": {"groups": [{"params": 5}]}}, "groups[0]: params must be a glob of parameter names or a list"),
        ({"optimizer": {"groups": [{"params": {"*": 1}}]}}, "groups[0]: params must be a glob of parameter names or a"),
        ({"optimizer": {"groups": [{"params": "*", "lr": "a"}]}}, "groups[0]: lr must be a number of at least 0"),
        ({"optimizer": {"groups": [{"params": "*", "decay": 1}]}}, "groups[0]: unknown fields decay"),
        ({"optimizer": {"groups": [{"params": "*.nothing"}]}}, "matches no trainable parameter"),
        ({"checkpoint.export_steps": 0}, "train.checkpoint.export_steps=0 must be at least 1"),
    ],
)
def test_invalid_settings_raise(settings, train, changes, message):
    settings["train"] |= changes
    code, _, err = train()
    assert code == 2
    assert message in err


def test_missing_8_bit_package_raises(settings, train, monkeypatch):
    from opslot.optim import selection

    monkeypatch.setattr(selection, "has_package", lambda name: False)
    settings["train"]["optimizer"] = {"name": "adamw_8bit"}
    code, _, err = train()
    assert code == 2
    assert "train.optimizer.name: adamw_8bit needs torchao; pip install torchao" in err


@pytest.mark.parametrize(("device", "usable"), [("gpu", True), ("cpu", False)])
def test_bitsandbytes_updates_on_a_gpu(device, usable, monkeypatch):
    from opslot.optim import selection
    from opslot.trainer import train_settings

    monkeypatch.setattr(selection, "has_package", lambda name: name == "bitsandbytes")
    monkeypatch.setattr(train_settings, "best_device", lambda: DeviceFacts(device))
    config = load_config(["--train.output_dir", "out", "--train.optimizer.name", "adamw_8bit"])
    problems = []
    train_settings.check_optimizer(config, problems)
    assert (problems == []) == usable
