"""Every mistake a user can make ends in one message and exit code 2, and leaves nothing behind."""

import json
import os
import re

import pytest
import yaml

from opslot._base.errors import ConfigError
from opslot.trainer import load_config
from opslot.trainer.validate import validate


def assert_refused(result, *messages, tmp_path):
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
        ("train", "micro_batch_size", 3, "train.global_batch_size=4 is no multiple of train.micro_batch_size=3"),
        ("train", "sp_size", 2, "torchrun --nproc-per-node 2 -m opslot train"),
        ("train", "ep_size", 4, "train.ep_size=4 needs a multiple of 4 processes"),
        ("train", "lr", 0, "train.lr=0.0 must be above 0"),
        ("train", "max_steps", 0, "train.max_steps=0 must be at least 1"),
        ("train", "lr", float("inf"), "train.lr must be finite"),
        ("train", "num_epochs", float("inf"), "train.num_epochs must be finite"),
        ("train", "weight_decay", float("inf"), "train.weight_decay must be finite"),
        ("train", "seed", 2**32, "train.seed=4294967296 must be below 2147483648"),
        ("train", "output_dir", "", "train.output_dir is empty"),
        ("train", "lr", None, "train.lr: expected float, found None"),
        ("train", "output_dir", None, "train.output_dir: expected str, found None"),
        ("train", "fsdp", 3, "train.fsdp is a section, found 3; give its fields, such as train.fsdp.replicas"),
        ("train", "learning_rate", 1, "train.learning_rate is not a field"),
        ("train", "resume_from", "nowhere", "train.resume_from=nowhere: no such folder"),
        ("model", "config_path", "nowhere", "model.config_path: no such file or folder: nowhere"),
        ("model", "config_path", None, "neither model.config_path nor model.model_path is set"),
        ("model", "tokenizer_path", "nowhere", "model.tokenizer_path: no such file or folder"),
        ("model", "ops_implementation", {"rms_norm": "eager"}, "rms_norm is not a field"),
        ("model", "ops_implementation", {"rms_norm_implementation": "fast"}, "no such implementation"),
        ("data", "train_path", "nowhere/*.txt", "no file matches nowhere/*.txt"),
        ("data", "train_path", "nowhere.txt", "no such file: nowhere.txt"),
        ("data", "train_path", "", "data.train_path is empty"),
        ("data", "eval_path", "nowhere.txt", "data.eval_path: no such file"),
        ("data", "max_tokens_per_batch", 16, "=16 has no room for a document of data.max_seq_len=32 tokens"),
        ("data", "max_seq_len", 4096, "the model has positions for 128 tokens"),
    ],
)
def test_one_wrong_field(train, settings, tmp_path, section, field, value, message):
    settings[section][field] = value
    assert_refused(train(), message, tmp_path=tmp_path)


def test_a_file_where_checkpoints_go(train, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "checkpoints").write_text("")
    code, _, err = train()
    assert code == 2
    assert "train.output_dir: " in err
    assert "out/checkpoints is a file" in err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["checkpoints"]


def test_batches_by_rows_and_by_tokens_at_once(train, settings, tmp_path):
    settings["data"] |= {"max_tokens_per_batch": 64, "packing": False}
    settings["train"]["micro_batch_size"] = 2
    messages = ("train.micro_batch_size=2 counts rows", "data.packing is off, but data.max_tokens_per_batch packs")
    assert_refused(train(), "2 problems", *messages, tmp_path=tmp_path)


def test_all_problems_at_once(train, settings, tmp_path):
    settings["train"] |= {"micro_batch_size": 3, "sp_size": 2, "warmup_steps": -1}
    settings["data"]["train_path"] = ["nowhere.txt", str(tmp_path)]
    settings["model"]["ops_implementation"] = {"rms_norm_implementation": "fast", "wrong_implementation": "eager"}
    result = train()
    assert_refused(
        result,
        "6 problems",
        "no multiple",
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
        ("other.jsonl", '{"content": "x"}\n', "other.jsonl, line 1: no field 'text'; it has content"),
        ("bad.parquet", "no parquet", "not a readable parquet file"),
    ],
)
def test_files_without_training_data(train, settings, tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    settings["data"]["train_path"] = str(tmp_path / name)
    assert_refused(train(), message, tmp_path=tmp_path)


def test_an_output_folder_below_a_file(train, settings, tmp_path):
    (tmp_path / "file").write_text("")
    settings["train"]["output_dir"] = str(tmp_path / "file" / "out")
    assert_refused(train(), "train.output_dir", "is a file", tmp_path=tmp_path)


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs a folder that nobody can write")
def test_an_output_folder_that_cannot_be_written(train, settings, tmp_path):
    settings["train"]["output_dir"] = "/proc/opslot/out"
    assert_refused(train(), "train.output_dir: /proc/opslot/out cannot be written", tmp_path=tmp_path)


def test_a_tokenizer_larger_than_the_model(train, settings, tmp_path, model_folder):
    config = json.loads((model_folder / "config.json").read_text())
    small = tmp_path / "small"
    small.mkdir()
    (small / "config.json").write_text(json.dumps({**config, "vocab_size": 100}))
    settings["model"] = {"config_path": str(small), "tokenizer_path": str(model_folder)}
    assert_refused(train(), "has 257 tokens, the model's vocab_size is 100", tmp_path=tmp_path)


def test_a_config_without_a_tokenizer(train, settings, tmp_path):
    folder = tmp_path / "bare"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    settings["model"]["config_path"] = str(folder)
    assert_refused(train(), "model.tokenizer_path is not set", tmp_path=tmp_path)


@pytest.mark.parametrize(
    ("processes", "section", "message"),
    [
        (4, {"sp_size": 3}, "sp=3 does not divide the 4 processes; sizes that would: 1, 2, 4"),
        (4, {"ep_size": 3}, "ep=3 does not divide the 4 ranks"),
        (4, {"fsdp": {"replicas": 3}}, "dp_replicate=3 does not divide the 4 ranks"),
        (3, {}, "train.global_batch_size=4 cannot be shared by 3 data-parallel ranks; make it a multiple of 3"),
        (2, {"micro_batch_size": 4}, "=4 on 2 data-parallel ranks; micro batches that fit: 1, 2"),
    ],
)
def test_sizes_that_do_not_fit_the_processes(settings, tmp_path, monkeypatch, processes, section, message):
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
def test_half_a_launchers_environment(train, tmp_path, monkeypatch, environment, message):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert_refused(train(), message, tmp_path=tmp_path)


def test_wandb_asked_for_but_missing(train, settings, tmp_path, monkeypatch):
    monkeypatch.setattr("opslot.trainer.validate.has_package", lambda name: name != "wandb")
    settings["train"]["logging"]["wandb"] = True
    assert_refused(train(), "wandb is not installed", tmp_path=tmp_path)


def test_a_missing_file_and_no_arguments(capsys, tmp_path):
    from opslot.trainer import cli_train

    assert cli_train([str(tmp_path / "run.yaml")]) == 2
    assert "no such file" in capsys.readouterr().err
    assert cli_train([]) == 2
    assert "usage: opslot train CONFIG.yaml" in capsys.readouterr().err
    assert cli_train(["--train.lr", "1"]) == 2
    assert "the first argument is the YAML file" in capsys.readouterr().err


def test_a_traceback_only_when_asked_for(train, settings):
    settings["train"]["lr"] = -1
    code, _, err = train("--traceback")
    assert code == 2
    assert "Traceback" in err
