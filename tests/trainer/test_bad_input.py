"""Invalid input ends in one error and exit code 2, and nothing is written."""

import json
import os
import re
from types import SimpleNamespace

import pytest
import torch
import yaml

from opslot._base.errors import ConfigError
from opslot.trainer import load_config
from opslot.trainer.validate import validate
from tests.chat import TEMPLATE


def assert_error(result, *messages, tmp_path):
    code, _, err = result
    assert code == 2
    assert err.startswith("opslot: error: ")
    assert "Traceback" not in err
    for message in messages:
        assert message in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("section", "field", "value", "message"),
    [
        ("train", "micro_batch_size", 3, "train.global_batch_size=4 is not a multiple of train.micro_batch_size=3"),
        ("train", "sp_size", 2, "torchrun --nproc-per-node 2 -m opslot train"),
        ("train", "ep_size", 4, "train.ep_size=4 needs a multiple of 4 processes"),
        ("train", "lr", 0, "train.lr=0.0 must be above 0"),
        ("train", "max_steps", 0, "train.max_steps=0 must be at least 1"),
        ("train", "lr", float("inf"), "train.lr must be finite"),
        ("train", "num_epochs", float("inf"), "train.num_epochs must be finite"),
        ("train", "weight_decay", float("inf"), "train.weight_decay must be finite"),
        ("train", "seed", 2**32, "train.seed=4294967296 must be below 2147483648"),
        (
            "train",
            "global_batch_size",
            10**20,
            "train.global_batch_size=100000000000000000000 must be at most 16777216",
        ),
        ("data", "num_workers", 10**6, "data.num_workers=1000000 must be at most 1024"),
        ("train", "output_dir", "", "train.output_dir is empty"),
        ("train", "weight_decay", None, "train.weight_decay: expected float, found None"),
        ("train", "output_dir", None, "train.output_dir: expected str, found None"),
        ("train", "fsdp", 3, "train.fsdp is a section, found 3; set its fields, such as train.fsdp.dp_replicate"),
        ("train", "learning_rate", 1, "train.learning_rate is not a field"),
        ("train", "checkpoint.resume_from", "nowhere", "train.checkpoint.resume_from=nowhere: no such folder"),
        ("model", "config_path", "nowhere", "model.config_path: no such file or folder: nowhere"),
        ("model", "model_path", "gpt2", "a model of the Hugging Face hub is named ORG/NAME"),
        ("model", "config_path", None, "neither model.config_path nor model.model_path is set"),
        ("model", "tokenizer_path", "nowhere", "model.tokenizer_path: no such file or folder"),
        ("model", "ops_implementation", {"rms_norm": "eager"}, "rms_norm is not a field"),
        ("model", "ops_implementation", {"rms_norm_implementation": "fast"}, "no such implementation"),
        ("data", "train_path", "nowhere/*.txt", "no file matches nowhere/*.txt"),
        ("data", "train_path", "nowhere.txt", "no such file: nowhere.txt"),
        ("data", "train_path", "", "data.train_path is empty"),
        ("data", "eval_path", "nowhere.txt", "data.eval_path: no such file"),
        ("data", "max_tokens_per_batch", 16, "data.max_tokens_per_batch=16 is less than data.max_seq_len=32"),
        ("data", "max_seq_len", 4096, "exceeds the model's max_position_embeddings=128"),
    ],
)
def test_invalid_field_raises(train, settings, tmp_path, section, field, value, message):
    settings[section][field] = value
    assert_error(train(), message, tmp_path=tmp_path)


def test_error_ends_a_process_group_of_one(train, settings, tmp_path):
    """NCCL warns at the exit of a process that left its group to it."""
    settings["train"]["fsdp"] = {"param_dtype": "bfloat16"}
    settings["data"]["max_seq_len"] = 4096
    assert_error(train(), "exceeds the model's max_position_embeddings", tmp_path=tmp_path)
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("prompt", "new_tokens", "message"),
    [
        ("x", 128, "evaluation.prompts[0], 'x': its answer exceeds the model's max_position_embeddings=128"),
        ("x" * 120, 9, "found: 120 tokens and evaluation.max_new_tokens=9"),
        ("", 4, "evaluation.prompts[0], '': it has no token"),
    ],
)
def test_prompts_that_the_model_cannot_answer_raise(train, settings, tmp_path, prompt, new_tokens, message):
    settings["train"]["eval_steps"] = 1
    settings["evaluation"] = {"prompts": [prompt], "max_new_tokens": new_tokens}
    assert_error(train(), message, "hint: ", tmp_path=tmp_path)


def test_prompt_that_the_chat_template_rejects_raises(train, settings, tmp_path):
    (tmp_path / "chat.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 2)
    strict = "{% if messages[0].content == 'x' %}{{ raise_exception('no x') }}{% endif %}"
    (tmp_path / "chat.jinja").write_text(strict + TEMPLATE)
    settings["task"] = "sft"
    settings["data"] |= {"train_path": str(tmp_path / "chat.jsonl"), "chat_template": str(tmp_path / "chat.jinja")}
    settings["train"]["eval_steps"] = 1
    settings["evaluation"] = {"prompts": ["y", "x"]}
    assert_error(train(), "evaluation.prompts[1], 'x': the chat template rejects it: no x", tmp_path=tmp_path)


def test_file_instead_of_checkpoint_folder_raises(train, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "checkpoints").write_text("")
    code, _, err = train()
    assert code == 2
    assert "train.output_dir: " in err
    assert "out/checkpoints is a file" in err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["checkpoints"]


def test_folders_instead_of_files_of_a_run_raise(train, tmp_path):
    """Before training, since some are written after the last step."""
    (tmp_path / "out" / "metrics.jsonl").mkdir(parents=True)
    (tmp_path / "out" / "hf").write_text("")
    code, _, err = train()
    assert code == 2
    assert "out/metrics.jsonl is a folder" in err
    assert "out/hf is a file" in err
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"metrics.jsonl", "hf"}


def test_both_batch_size_fields_raise(train, settings, tmp_path):
    settings["data"] |= {"max_tokens_per_batch": 64, "packing": False}
    settings["train"]["micro_batch_size"] = 2
    both = "train.micro_batch_size=2 and data.max_tokens_per_batch=64 both set the micro batch size"
    packs = "data.max_tokens_per_batch packs documents, but data.packing is off"
    assert_error(train(), "2 problems", both, packs, tmp_path=tmp_path)


def test_all_problems_in_one_error(train, settings, tmp_path):
    settings["train"] |= {"micro_batch_size": 3, "sp_size": 2, "warmup_steps": -1}
    settings["data"]["train_path"] = ["nowhere.txt", str(tmp_path)]
    settings["model"]["ops_implementation"] = {"rms_norm_implementation": "fast", "wrong_implementation": "eager"}
    result = train()
    assert_error(
        result,
        "6 problems",
        "not a multiple",
        "sp_size=2",
        "warmup_steps=-1",
        "nowhere.txt",
        "is a folder",
        "wrong_implementation is not a field",
        tmp_path=tmp_path,
    )


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", "", "empty.txt is empty"),
        ("blank.txt", "\n\n", "no text in any of them"),
        ("bad.jsonl", '{"text": "x"}\n{"text": "y"\n', "bad.jsonl, line 2: not JSON"),
        ("other.jsonl", '{"content": "x"}\n', "other.jsonl: no field 'text'; it has content"),
        ("chats.jsonl", '{"messages": []}\n', "no field 'text'; it has messages. For chats, set task: sft"),
        (
            "pairs.jsonl",
            '{"query": "x", "response": "y"}\n',
            "holds the text; for chats, set task: sft and rename query to prompt and response to completion",
        ),
        ("bad.parquet", "no parquet", "not a readable parquet file"),
    ],
)
def test_files_without_training_data_raise(train, settings, tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    settings["data"]["train_path"] = str(tmp_path / name)
    assert_error(train(), message, tmp_path=tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("file", "{folder} is a file; choose another folder"),
        ("file/a/out", "{folder} cannot be created: {tmp_path}/file is a file; choose another folder"),
        ("link/out", "{tmp_path}/link is a link to nowhere, which does not exist; choose another folder"),
    ],
)
def test_output_folder_that_cannot_be_created_raises(train, settings, tmp_path, name, message):
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("nowhere")
    settings["train"]["output_dir"] = folder = str(tmp_path / name)
    expected = f"train.output_dir: {message.format(folder=folder, tmp_path=tmp_path)}"
    assert_error(train(), "1 problem", expected, tmp_path=tmp_path)


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs a folder that cannot be written")
@pytest.mark.parametrize(
    ("folder", "message"),
    [
        ("/proc/opslot/out", "/proc/opslot/out cannot be created in /proc (its file system takes no new folders)"),
        ("/proc/self", "/proc/self cannot be written (its file system takes no new folders)"),
    ],
)
def test_output_folder_that_cannot_be_written_raises(train, settings, tmp_path, folder, message):
    settings["train"]["output_dir"] = folder
    assert_error(train(), f"train.output_dir: {message}; choose another folder", tmp_path=tmp_path)


def test_tokenizer_larger_than_the_vocabulary_raises(train, settings, tmp_path, model_folder):
    config = json.loads((model_folder / "config.json").read_text())
    small = tmp_path / "small"
    small.mkdir()
    (small / "config.json").write_text(json.dumps({**config, "vocab_size": 100}))
    settings["model"] = {"config_path": str(small), "tokenizer_path": str(model_folder)}
    assert_error(train(), "has 257 tokens, more than the model's vocab_size=100", tmp_path=tmp_path)


def test_missing_tokenizer_raises(train, settings, tmp_path):
    folder = tmp_path / "bare"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    settings["model"]["config_path"] = str(folder)
    assert_error(train(), "model.tokenizer_path is not set", tmp_path=tmp_path)


@pytest.mark.parametrize(
    ("processes", "section", "message"),
    [
        (4, {"sp_size": 3}, "sp=3 does not divide the 4 processes\n  hint: use one of 1, 2, 4"),
        (4, {"ep_size": 3}, "ep=3 does not divide the 4 ranks"),
        (4, {"fsdp": {"dp_replicate": 3}}, "dp_replicate=3 does not divide the 4 ranks"),
        (3, {}, "train.global_batch_size=4 is not divisible by the 3 data-parallel ranks; set it to a multiple of 3"),
        (
            2,
            {"data_parallel_mode": "ddp", "ep_size": 2, "fsdp": {"cpu_offload": True}},
            "keeps all parameters on each process, which excludes train.ep_size, train.fsdp.cpu_offload; set it to",
        ),
        (2, {"micro_batch_size": 4}, "=4 on 2 data-parallel ranks; valid micro batch sizes: 1, 2"),
    ],
)
def test_sizes_that_do_not_fit_the_processes_raise(settings, tmp_path, monkeypatch, processes, section, message):
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    settings["train"] |= section
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(settings))
    with pytest.raises(ConfigError, match=re.escape(message)):
        validate(load_config([str(file)]))


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "1"}, "RANK=1, but WORLD_SIZE is not set"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "MASTER_ADDR and MASTER_PORT are not set"),
        ({"WORLD_SIZE": "many"}, "WORLD_SIZE='many', which is not a number"),
    ],
)
def test_incomplete_launcher_environment_raises(train, tmp_path, monkeypatch, environment, message):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert_error(train(), message, tmp_path=tmp_path)


def test_missing_wandb_raises(train, settings, tmp_path, monkeypatch):
    monkeypatch.setattr("opslot.trainer.validate.has_package", lambda name: name != "wandb")
    settings["train"]["logging"]["wandb"] = True
    assert_error(train(), "wandb is not installed", tmp_path=tmp_path)


def test_missing_file_and_no_arguments(capsys, tmp_path):
    from opslot.trainer import cli_train

    assert cli_train([str(tmp_path / "run.yaml")]) == 2
    assert "no such file" in capsys.readouterr().err
    assert cli_train([]) == 2
    assert "usage: opslot train [CONFIG.yaml]" in capsys.readouterr().err


def test_first_rank_of_torchrun_reports_before_others_exit(monkeypatch, capsys, tmp_path):
    """torchrun ends all ranks as soon as one exits."""
    from opslot.trainer import cli_train

    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "none"}.items():
        monkeypatch.setenv(name, value)
    waits = []
    monkeypatch.setattr("opslot.trainer.main.exit_with_launcher", lambda: None)
    monkeypatch.setattr("opslot.trainer.main.time", SimpleNamespace(sleep=waits.append))
    assert cli_train([str(tmp_path / "none.yaml")]) == 1
    assert waits == [10.0]
    assert capsys.readouterr().err == ""


def test_traceback_option(train, settings):
    settings["train"]["lr"] = -1
    code, _, err = train("--traceback")
    assert code == 2
    assert "Traceback" in err


@pytest.mark.parametrize(
    ("section", "field", "value", "message"),
    [
        ("train", "output_dir", "~nosuchuser/out", "train.output_dir: '~nosuchuser' is not a user's home folder"),
        ("train", "output_dir", "a\0b", "train.output_dir: 'a\\x00b' is not a path"),
        ("train", "output_dir", "x" * 300, "is not a path (File name too long)"),
        ("data", "train_path", "~nosuchuser/*.txt", "data.train_path: '~nosuchuser'"),
        ("data", "cache_dir", "~nosuchuser", "data.cache_dir: '~nosuchuser'"),
        ("model", "config_path", "~nosuchuser", "model.config_path: '~nosuchuser'"),
        ("model", "model_path", "Qwen/Qwen3-0.6B", "run `hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B`"),
        ("data", "train_path", "hf://datasets/org/name/*.jsonl", "run `hf download org/name --repo-type dataset"),
    ],
)
def test_invalid_paths_raise(train, settings, tmp_path, monkeypatch, section, field, value, message):
    monkeypatch.chdir(tmp_path)
    settings[section][field] = value
    assert_error(train(), message, tmp_path=tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": [5]}, "found: architectures=[5]\n  hint: set architectures to a list of class names"),
        (
            {"attention_dropout": 2.0},
            "found: attention_dropout=2.0\n  hint: set attention_dropout to a number in [0, 1)",
        ),
        ({"rms_norm_eps": -1.0}, "found: rms_norm_eps=-1.0\n  hint: set rms_norm_eps to a finite number from 0 on"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 0}}, "found: rope_parameters.rope_theta=0\n"),
        ({"sliding_window": -5, "use_sliding_window": True}, "hint: set sliding_window to a number above 0, or null"),
        ({"hidden_act": "gelu_fats"}, "found: hidden_act='gelu_fats'\n  hint: set hidden_act to one of gelu_fast"),
        ({"hidden_act": "nope"}, "gelu_pytorch_tanh"),
        (
            {"rope_parameters": {"rope_type": "zzz", "rope_theta": 1e4}},
            "found: rope_parameters.rope_type='zzz'\n  hint: set rope_parameters.rope_type to one of default, dynamic",
        ),
        ({"attn_implementation": "nope"}, "nope"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok=9 exceeds num_experts=4"),
        ({"pad_token_id": 9999}, "found: pad_token_id=9999 with vocab_size=260\n  hint: set pad_token_id to the id of"),
        ({"rms_norm_eps": "nope"}, "rms_norm_eps"),
    ],
)
def test_invalid_model_configs_raise(train, settings, tmp_path, model_folder, changes, message):
    config = json.loads((model_folder / "config.json").read_text())
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | changes))
    settings["model"] = {"config_path": str(folder), "tokenizer_path": str(model_folder)}
    assert_error(train(), message, tmp_path=tmp_path)


def test_invalid_config_is_not_reported_as_tokenizer_error(train, settings, tmp_path, tokenizer, model_folder):
    config = json.loads((model_folder / "config.json").read_text())
    folder = tmp_path / "model"
    folder.mkdir()
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": "nope"}))
    settings["model"] = {"config_path": str(folder)}
    code, _, err = train()
    assert code == 2
    assert "rms_norm_eps" in err
    assert "tokenizer" not in err


def test_training_without_a_yaml_file(settings, tmp_path, capsys):
    from opslot.trainer import cli_train

    options = [f"--{section}.{name}={value}" for section, fields in settings.items() for name, value in fields.items()]
    options = [option for option in options if "logging" not in option]
    assert cli_train([*options, "--train.logging.tensorboard=false", "--train.max_steps=1"]) == 0
    assert "done: 1 step;" in capsys.readouterr().out


def test_errors_of_parallelism_name_the_training_fields(train, monkeypatch):
    def fail(model, state, **options):
        raise ConfigError("ep=2, but llama has no experts", hint="set ep to 1")

    monkeypatch.setattr("opslot.trainer.prepare.parallelize", fail)
    code, _, err = train()
    assert code == 2
    assert "sp is train.sp_size, ep is train.ep_size" in err
