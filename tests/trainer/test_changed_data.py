"""Resuming on data that was touched, moved or changed, and data without targets or with special tokens."""

import os
import shutil

import pytest
import yaml

from opslot.data.corpus import open_corpus
from opslot.data.encoder import TextEncoder
from opslot.data.tokenizer import load_tokenizer
from opslot.trainer import TextTrainer, load_config
from opslot.trainer.callbacks.writers import read_metrics
from opslot.trainer.validate import validate


@pytest.fixture
def own_text(settings, text_folder, tmp_path):
    """A copy of the training text that a test may change."""
    folder = tmp_path / "text"
    shutil.copytree(text_folder, folder)
    settings["data"]["train_path"] = f"{folder}/*.txt"
    settings["train"]["checkpoint.save_steps"] = 2
    return folder


def losses(folder):
    return [record["loss"] for record in read_metrics(folder)]


def test_touched_and_moved_files_do_not_prevent_a_resume(train, settings, own_text, tmp_path):
    settings["train"]["lr_scheduler"] = "constant"
    assert train("--train.max_steps=6", f"--train.output_dir={tmp_path / 'straight'}")[0] == 0
    assert train()[0] == 0
    for file in own_text.iterdir():
        os.utime(file, ns=(1, 1))
    own_text.rename(tmp_path / "moved")
    settings["data"]["train_path"] = f"{tmp_path}/moved/*.txt"
    code, _, err = train("--train.checkpoint.resume_from=latest", "--train.max_steps=6")
    assert (code, err) == (0, "")
    assert losses(tmp_path / "out") == losses(tmp_path / "straight")


def test_changed_text_raises_and_can_be_allowed(train, settings, own_text):
    assert train()[0] == 0
    file = own_text / "03.txt"
    text = file.read_text()
    file.write_text("9" + text[1:])
    code, _, err = train("--train.checkpoint.resume_from=latest", "--train.max_steps=6")
    assert code == 2
    assert "its data has changed since the checkpoint:\n- data.train_path: 20 files, " in err
    assert "set data.allow_changes: true" in err
    code, out, _ = train("--train.checkpoint.resume_from=latest", "--train.max_steps=6", "--data.allow_changes=true")
    assert code == 0
    assert "the data has changed since the checkpoint (data.allow_changes is set): data.train_path: 20 files, " in out


def test_changed_tokenizer_raises(train, settings, own_text, model_folder, tmp_path):
    assert train()[0] == 0
    tokenizer = load_tokenizer(model_folder)
    tokenizer.add_tokens(["and"])
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    settings["model"]["tokenizer_path"] = str(tmp_path / "tokenizer")
    code, _, err = train("--train.checkpoint.resume_from=latest", "--train.max_steps=6")
    assert code == 2
    assert "- model.tokenizer_path: content " in err
    assert "data.train_path" not in err.partition("hint")[0].replace("model.tokenizer_path", "")


def test_hash_of_large_files_samples_their_content(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr("opslot.data.corpus._DIGEST_BYTES", 1000)
    monkeypatch.setattr("opslot.data.corpus._DIGEST_PART", 100)
    file = tmp_path / "a.txt"

    def identity(content):
        file.write_bytes(content)
        return open_corpus([file], TextEncoder(tokenizer), cache_dir=str(tmp_path / "cache")).identity[
            "data.train_path"
        ]

    text = b"0123456789" * 1000
    assert identity(text) == identity(text)
    assert identity(text) != identity(b"x" + text[1:])
    assert identity(text) != identity(text[:-1] + b"x")
    assert identity(text) != identity(text + b"x")


def test_run_without_any_target_raises(train, settings, tmp_path):
    (tmp_path / "short.txt").write_text("a\n" * 50)
    settings["data"] |= {
        "train_path": str(tmp_path / "short.txt"),
        "sample_by": "line",
        "append_eos": False,
    }
    code, _, err = train()
    assert code == 2
    assert "no token to predict in the last 4 steps" in err
    assert not (tmp_path / "out" / "hf").exists()
    assert train("--train.max_steps=1000", f"--train.output_dir={tmp_path / 'long'}")[2].count("last 10 steps") == 1


def test_evaluation_without_any_target_raises(train, settings, tmp_path):
    (tmp_path / "short.txt").write_text("a")
    settings["data"] |= {"eval_path": str(tmp_path / "short.txt"), "append_eos": False}
    settings["train"]["eval_steps"] = 2
    code, _, err = train()
    assert code == 2
    assert "no token to predict in the evaluation data" in err


def test_special_tokens_in_the_text(tmp_path, tokenizer):
    file = tmp_path / "a.txt"
    file.write_text("a<eos>b")

    def ids(split):
        corpus = open_corpus(
            [file], TextEncoder(tokenizer, split_special_tokens=split), cache_dir=str(tmp_path / "cache")
        )
        return corpus.shard(0).tokens(0).tolist()

    assert ids(False).count(tokenizer.eos_token_id) == 2
    assert ids(True).count(tokenizer.eos_token_id) == 1
    assert tokenizer.decode(ids(True)[:-1]) == "a<eos>b"
    assert len(ids(True)) == 8


def test_settings_without_effect_are_reported(train, settings):
    settings["data"]["eval_path"] = settings["data"]["train_path"]
    settings["train"] |= {"warmup_steps": 9, "fsdp": {"copy_engine": True, "ulysses_overlap": True}}
    settings["model"]["device"] = "cpu"
    file = settings["train"]["output_dir"] + ".yaml"
    with open(file, "w") as stream:
        yaml.safe_dump(settings, stream)
    trainer = TextTrainer(load_config([file]))
    assert trainer.inputs.warnings == [
        "data.eval_path has no effect without train.eval_steps",
        "train.fsdp.copy_engine has no effect on a CPU",
        "train.fsdp.ulysses_overlap has no effect with train.sp_size=1",
        "train.warmup_steps=9 exceeds train.max_steps=4, so the learning rate never reaches train.lr",
    ]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"data.eval_fraction": 0.1}, "without train.eval_steps"),
        ({"data.eval_fraction": 0.1, "data.eval_path": "text", "train.eval_steps": 2}, "with data.eval_path"),
        ({"data.text_field": "body"}, "on plain text files"),
        ({"data.sample_by": "line", "data.train_path": "jsonl"}, "on files that are not plain text"),
        ({"evaluation.max_new_tokens": 2}, "without evaluation.prompts"),
        ({"train.num_epochs": 2}, "with train.max_steps"),
        ({"train.fsdp.prefetch": 2, "train.data_parallel_mode": "ddp"}, "with train.data_parallel_mode=ddp"),
        ({"train.logging.wandb_entity": "team"}, "without train.logging.wandb"),
        ({"train.logging.run_name": "first"}, "without train.logging.wandb or train.logging.trackio"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_field_that_another_one_switches_off_is_reported(settings, tmp_path, text_folder, changes, reason):
    (tmp_path / "texts.jsonl").write_text('{"text": "a"}\n')
    paths = {"text": f"{text_folder}/*.txt", "jsonl": str(tmp_path / "texts.jsonl")}
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(settings))
    options = [f"--{name}={paths.get(value, value)}" for name, value in changes.items()]
    assert validate(load_config([str(file), *options])).warnings == [f"{next(iter(changes))} has no effect {reason}"]


@pytest.mark.parametrize(
    ("dtype", "lr", "warns"), [("bfloat16", 1e-5, True), ("bfloat16", 1e-3, False), ("float32", 1e-5, False)]
)
def test_updates_that_bfloat16_rounds_away_are_reported(train, settings, dtype, lr, warns):
    settings["model"]["torch_dtype"] = dtype
    settings["train"] |= {"lr": lr, "max_steps": 1}
    code, out, _ = train()
    assert code == 0
    assert ("warning: model.torch_dtype=bfloat16 rounds most updates of train.lr=1e-05 away" in out) == warns
