"""Tasks other than pretraining, mixtures, and what evaluations do, in full runs of `opslot train`."""

import gzip
import json
import shutil
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from opslot._base.errors import DataError
from opslot.checkpoint.training_state import read_state
from opslot.data.config import DataConfig
from opslot.data.labels import LabelEncoder, find_label_names
from opslot.trainer import load_config
from opslot.trainer.callbacks.writers import read_metrics
from opslot.trainer.exports import exported_step
from opslot.trainer.parse import to_yaml
from opslot.trainer.run_data import set_sample_length
from tests.chat import TEMPLATE, write_chat_model, write_chats
from tests.trainer.runs import run_config, trainer_of

QWEN3 = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 260,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 64,
    "max_position_embeddings": 128,
    "eos_token_id": 0,
}


@pytest.fixture
def chat_settings(settings, tmp_path, tokenizer):
    """Settings of task sft on 24 short conversations; the tokenizer has a chat template."""
    model = tmp_path / "chat_model"
    write_chat_model(model, tokenizer, QWEN3)
    file = tmp_path / "chat.jsonl"
    write_chats(file)
    settings["task"] = "sft"
    settings["model"] = {"config_path": str(model)}
    settings["data"] |= {"train_path": str(file), "max_seq_len": 64}
    return settings


def test_chat_run_and_its_export(chat_settings, train, tmp_path):
    chat_settings["train"] |= {"max_steps": 12, "eval_steps": 6, "checkpoint.save_steps": 6}
    chat_settings["evaluation"] = {"prompts": ["3?"], "max_new_tokens": 4}
    code, out, err = train()
    assert (code, err) == (0, "")
    assert "tokens in 24 samples" in out
    assert "of them trained" in out
    records = read_metrics(tmp_path / "out")
    assert records[-1]["eval_perplexity"] == pytest.approx(torch.tensor(records[-1]["eval_loss"]).exp().item())
    samples = [json.loads(line) for line in (tmp_path / "out" / "samples.jsonl").read_text().splitlines()]
    assert [(sample["step"], sample["prompt"]) for sample in samples] == [(6, "3?"), (12, "3?")]
    assert AutoTokenizer.from_pretrained(tmp_path / "out" / "hf").chat_template == TEMPLATE
    assert f'AutoModelForCausalLM.from_pretrained("{tmp_path}/out/hf")' in out


def test_resumed_chat_run_equals_an_uninterrupted_one(chat_settings, train, tmp_path):
    chat_settings["train"] |= {"max_steps": 8, "checkpoint.save_steps": 4, "checkpoint.save_total_limit": None}
    assert train()[0] == 0
    straight = [record["loss"] for record in read_metrics(tmp_path / "out")]
    first = tmp_path / "out" / "checkpoints" / "step_00000004"
    code, _, err = train("--train.checkpoint.resume_from", str(first), "--train.output_dir", str(tmp_path / "again"))
    assert (code, err) == (0, "")
    assert [record["loss"] for record in read_metrics(tmp_path / "again")] == straight[4:]


def test_packed_loss_equals_unpacked_loss(chat_settings, tmp_path):
    """All conversations, packed and padded: the same loss and gradients."""
    chat_settings["data"]["eval_path"] = chat_settings["data"]["train_path"]
    chat_settings["train"] |= {"max_steps": 1, "eval_steps": 1, "micro_batch_size": 2}
    found = []
    for packing in (True, False):
        trainer = trainer_of(chat_settings, tmp_path, f"--data.packing={packing}")
        micro_batches = [batch for batch, _ in trainer.evaluated_batches()]
        assert all(("cu_seq_lens_q" in batch) == packing for batch in micro_batches)
        targets = sum(trainer.count_targets(batch) for batch in micro_batches)
        loss, _, _ = trainer._forward_backward(micro_batches, targets)
        found.append((targets, loss, trainer.model.model.layers[0].mlp.down_proj.weight.grad.clone()))
    assert found[0][0] == found[1][0]
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-5)
    torch.testing.assert_close(found[0][2], found[1][2], rtol=1e-4, atol=1e-6)


def test_evaluation_of_pretraining_counts_all_tokens(settings, tmp_path):
    """The last, partial sample was left out."""
    settings["train"] |= {"eval_steps": 1}
    settings["data"] |= {"eval_path": settings["data"]["train_path"], "max_seq_len": 37}
    trainer = trainer_of(settings, tmp_path)
    batches = [batch for batch, _ in trainer.evaluated_batches()]
    (dataset,) = trainer.data.eval_sets
    lengths = [dataset.corpus.shard(number).lengths for number in dataset.documents.shards]
    tokens = sum(int(own.sum()) for own in lengths)
    assert tokens % 37
    # With padding.
    assert sum(batch["input_ids"].numel() for batch in batches) == -(-tokens // 37) * 37


def test_loss_is_that_of_transformers(chat_settings, tmp_path):
    """The evaluation's loss from the masks of this test's own template arithmetic."""
    chat_settings["train"] |= {"max_steps": 1, "eval_steps": 1}
    chat_settings["data"]["eval_path"] = chat_settings["data"]["train_path"]
    trainer = trainer_of(chat_settings, tmp_path)
    loss = trainer.evaluate()["eval_loss"]
    trainer.export(tmp_path / "export")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "export").eval()
    tokenizer = trainer.tokenizer
    total = count = 0
    for line in Path(chat_settings["data"]["train_path"]).read_text().splitlines():
        user, assistant = json.loads(line)["messages"]
        prompt = tokenizer(f"u:{user['content']}<eos>a:")["input_ids"]
        answer = tokenizer(f"{assistant['content']}<eos>")["input_ids"]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
        total -= sum(logits[len(prompt) - 1 + i, token].item() for i, token in enumerate(answer))
        count += len(answer)
    assert loss == pytest.approx(total / count, rel=1e-5)


def test_early_stopping_keeps_the_best_model(chat_settings, train, tmp_path, monkeypatch):
    from opslot.trainer.text import TextTrainer

    losses = iter([3.0, 2.0, 2.5, 2.2, 1.0])
    monkeypatch.setattr(TextTrainer, "evaluate", lambda self: {"eval_loss": next(losses)})
    chat_settings["train"] |= {"max_steps": 10, "eval_steps": 1}
    chat_settings["evaluation"] = {"early_stopping_patience": 2}
    code, out, err = train()
    assert (code, err) == (0, "")
    assert "stopping early: eval_loss has not improved in 2 evaluations; the best was 2.0000 at step 2" in out
    assert [record["step"] for record in read_metrics(tmp_path / "out")] == [1, 2, 3, 4]
    assert f"the best model (step 2) is in {tmp_path}/out/hf_best" in out
    best, last = (
        AutoModelForCausalLM.from_pretrained(tmp_path / "out" / name).state_dict() for name in ("hf_best", "hf")
    )
    assert not torch.equal(best["model.norm.weight"], last["model.norm.weight"])
    code, out, _ = train("--train.checkpoint.resume_from", "latest")
    assert code == 0
    assert "nothing left to train" in out


@pytest.mark.parametrize("lost", ["removed", "of a later step"])
def test_best_model_after_the_resumed_checkpoint_is_replaced(chat_settings, train, tmp_path, monkeypatch, lost):
    """A killed run may have exported a model that the resumed one, with other settings, never has again."""
    from opslot.trainer.text import TextTrainer

    losses = iter([2.0, 1.0, 2.5, 2.3, 2.4, 2.4])
    monkeypatch.setattr(TextTrainer, "evaluate", lambda self: {"eval_loss": next(losses)})
    chat_settings["train"] |= {"max_steps": 2, "eval_steps": 1, "checkpoint": {"save_steps": 1}}
    chat_settings["evaluation"] = {"save_best": True}
    assert train()[0] == 0
    checkpoints, best = tmp_path / "out" / "checkpoints", tmp_path / "out" / "hf_best"
    assert exported_step(tmp_path / "out", "hf_best") == 2
    shutil.rmtree(checkpoints / "step_00000002")
    if lost == "removed":
        shutil.rmtree(best)
    code, out, err = train("--train.max_steps", "4", "--train.checkpoint.resume_from", "latest")
    assert (code, err) == (0, "")
    reason = "does not exist" if lost == "removed" else "has the model of step 2, after the resumed one"
    assert f"{best} {reason}; the next evaluation writes it" in out
    assert f"the best model (step 3) is in {best}" in out
    assert exported_step(tmp_path / "out", "hf_best") == 3
    # The best evaluation, for early stopping, is still that of step 1.
    state, _ = read_state(checkpoints / "step_00000004")
    assert (state["best"]["step"], state["best"]["since"], state["best"]["exported"]) == (1, 3, 2.3)
    code, out, err = train("--train.max_steps", "5", "--train.checkpoint.resume_from", "latest")
    assert (code, err) == (0, "")
    assert "the next evaluation" not in out
    assert exported_step(tmp_path / "out", "hf_best") == 3


def test_mixture_is_drawn_by_weight_and_resumes_exactly(settings, train, tmp_path):
    for name, letter in (("a", "a"), ("b", "b")):
        lines = [json.dumps({"text": letter * 31}) for _ in range(50)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    settings["data"].pop("train_path")
    settings["data"]["train"] = [
        {"path": str(tmp_path / "a.jsonl"), "weight": 3},
        {"path": str(tmp_path / "b.jsonl"), "weight": 1},
    ]
    settings["train"] |= {"max_steps": 6, "checkpoint.save_steps": 3, "checkpoint.save_total_limit": None}
    trainer = trainer_of(settings, tmp_path)
    letters = [int(trainer.train_set[number]["input_ids"][0]) for number in range(400)]
    share = letters.count(max(set(letters), key=letters.count)) / len(letters)
    assert 0.68 < share < 0.82
    assert train()[0] == 0
    straight = [record["loss"] for record in read_metrics(tmp_path / "out")]
    checkpoint = str(tmp_path / "out" / "checkpoints" / "step_00000003")
    assert train("--train.checkpoint.resume_from", checkpoint, "--train.output_dir", str(tmp_path / "again"))[0] == 0
    assert [record["loss"] for record in read_metrics(tmp_path / "again")] == straight[3:]
    settings["data"]["train"][0]["weight"] = 2
    code, _, err = train("--train.checkpoint.resume_from", checkpoint, "--train.output_dir", str(tmp_path / "other"))
    assert code == 2
    assert "weight 0.75 -> " in err


def test_frozen_parameters_and_learning_rates_of_a_text_model(settings, tmp_path):
    settings["train"] |= {"freeze": ["model.layers.0"], "lr_of": {"*norm*": 1e-3}, "lr_scheduler": "constant"}
    trainer = trainer_of(settings, tmp_path)
    frozen = {name for name, p in trainer.model.named_parameters() if not p.requires_grad}
    assert frozen == {name for name, _ in trainer.model.named_parameters() if name.startswith("model.layers.0.")}
    trainer._train_step(iter(trainer.batches))
    names = {id(p): name for name, p in trainer.model.named_parameters()}
    rates = {names[id(p)]: group["lr"] for group in trainer.optimizer.param_groups for p in group["params"]}
    assert not frozen & rates.keys()
    assert {"norm" in name for name, rate in rates.items() if rate == pytest.approx(1e-3)} == {True}
    assert rates["model.layers.1.self_attn.q_proj.weight"] == pytest.approx(1e-2)
    assert "of them trained" in trainer.title


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([], "data.train is empty"),
        ([{"weight": 1}], "data.train[0]: no path"),
        ([{"path": "a.txt", "wieght": 1}], "data.train[0]: unknown fields wieght"),
        ([{"path": "{here}", "weight": 0}], "data.train[0]: weight must be a number above 0, found 0"),
        ([{"path": "{here}", "weight": 1}] * 2, "twice; add their weights"),
    ],
)
def test_bad_mixtures(settings, train, tmp_path, entries, message):
    (tmp_path / "a.txt").write_text("text")
    here = str(tmp_path / "a.txt")
    settings["data"].pop("train_path")
    settings["data"]["train"] = [
        {**entry, **({"path": here} if "{" in entry.get("path", "") else {})} for entry in entries
    ]
    code, _, err = train()
    assert code == 2
    assert message in err


def test_tokens_of_ranks_whose_samples_have_other_lengths(chat_settings, ranks, tmp_path):
    """Each micro batch is padded to its own longest sample."""
    texts = tmp_path / "labels.jsonl"
    texts.write_text("".join(json.dumps({"text": "a" * (3 + 7 * i % 20), "label": i % 2}) + "\n" for i in range(40)))
    chat_settings["task"] = "classification"
    chat_settings["data"]["train_path"] = str(texts)
    files = []
    for name in ("one", "two"):
        files.append(tmp_path / f"{name}.yaml")
        train = chat_settings["train"] | {"micro_batch_size": 1, "output_dir": str(tmp_path / name)}
        files[-1].write_text(yaml.safe_dump(chat_settings | {"train": train}))
    assert run_config(str(files[0])) == 0
    assert ranks.run(run_config, str(files[1])) == [0, 0]
    one, two = ([record["tokens"] for record in read_metrics(tmp_path / name)] for name in ("one", "two"))
    assert one == two


@pytest.mark.parametrize("per_token", [False, True], ids=["texts", "words"])
def test_classification(chat_settings, train, tmp_path, per_token):
    file = tmp_path / "labels.jsonl"
    with file.open("w") as lines:
        for i in range(40):
            word, label = [("aaa", "first"), ("bbb", "second")][i % 2]
            record = (
                {"tokens": [word, "x"], "labels": [label, "other"]} if per_token else {"text": word, "label": label}
            )
            lines.write(json.dumps(record) + "\n")
    chat_settings["task"] = "classification"
    chat_settings["data"]["train_path"] = str(file)
    chat_settings["train"] |= {"max_steps": 30, "eval_steps": 30, "lr": 1e-2}
    chat_settings["evaluation"] = {"best_metric": "f1", "save_best": True}
    code, _, err = train()
    assert (code, err) == (0, "")
    last = read_metrics(tmp_path / "out")[-1]
    assert last["eval_accuracy"] == last["eval_f1"] == 1.0
    config = json.loads((tmp_path / "out" / "hf" / "config.json").read_text())
    names = ["first", "other", "second"] if per_token else ["first", "second"]
    assert config["id2label"] == {str(i): name for i, name in enumerate(names)}
    assert config["architectures"] == [f"Qwen3For{'Token' if per_token else 'Sequence'}Classification"]
    assert (tmp_path / "out" / "hf_best" / "model.safetensors").is_file()
    if not per_token:
        model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out" / "hf").eval()
        inputs = AutoTokenizer.from_pretrained(tmp_path / "out" / "hf")("bbb", return_tensors="pt")
        predicted = model(input_ids=inputs["input_ids"]).logits.argmax(-1).item()
        assert model.config.id2label[predicted] == "second"


@pytest.mark.parametrize("per_token", [False, True])
def test_classification_by_an_encoder_without_slots_in_its_code(chat_settings, train, tmp_path, per_token):
    """DeBERTa-v2: torch's layer norms alone get kernels. The losses are those of Transformers' model."""
    model = tmp_path / "deberta"
    sizes = {"vocab_size": 260, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 32, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "pad_token_id": 0}
    AutoConfig.for_model("deberta-v2", **sizes).save_pretrained(model)
    AutoTokenizer.from_pretrained(chat_settings["model"]["config_path"]).save_pretrained(model)
    labels = {"tokens": ["a", "b"], "labels": ["x", "y"]} if per_token else {"text": "ab", "label": "x"}
    others = {"tokens": ["b"], "labels": ["x"]} if per_token else {"text": "b", "label": "y"}
    (tmp_path / "labels.jsonl").write_text(f"{json.dumps(labels)}\n{json.dumps(others)}\n" * 4)
    chat_settings |= {"task": "classification", "model": {"config_path": str(model)}}
    chat_settings["data"]["train_path"] = str(tmp_path / "labels.jsonl")
    chat_settings["train"]["max_steps"] = 2
    code, out, err = train()
    assert (code, err) == (0, "")
    assert "layer_norm" in out
    losses = [record["loss"] for record in read_metrics(tmp_path / "out")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPSLOT_BACKEND", "hf")
        assert train("--train.output_dir", str(tmp_path / "theirs"))[0] == 0
    assert losses == pytest.approx([record["loss"] for record in read_metrics(tmp_path / "theirs")], rel=1e-6)


def test_classifier_from_a_language_model(chat_settings, train, tmp_path):
    chat_settings["train"]["max_steps"] = 1
    assert train()[0] == 0
    (tmp_path / "labels.jsonl").write_text('{"text": "a", "label": 0}\n{"text": "b", "label": 2}\n')
    chat_settings["task"] = "classification"
    chat_settings["model"] = {"model_path": str(tmp_path / "out" / "hf")}
    chat_settings["data"]["train_path"] = str(tmp_path / "labels.jsonl")
    chat_settings["train"]["output_dir"] = str(tmp_path / "classifier")
    code, _, err = train()
    assert (code, err) == (0, "")
    config = json.loads((tmp_path / "classifier" / "hf" / "config.json").read_text())
    assert list(config["id2label"].values()) == ["LABEL_0", "LABEL_1", "LABEL_2"]


def test_head_of_a_token_classifier_is_new_and_trained_whole(chat_settings, train, tmp_path):
    """GPT-2's is named classifier, not score; data.max_seq_len is at most its number of positions by default."""
    model = tmp_path / "gpt2"
    sizes = {"vocab_size": 260, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 48, "eos_token_id": 0}
    AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", bos_token_id=0, **sizes)).save_pretrained(model)
    AutoTokenizer.from_pretrained(chat_settings["model"]["config_path"]).save_pretrained(model)
    lines = [json.dumps({"tokens": ["a", str(i)], "labels": ["x", "y"]}) for i in range(8)]
    (tmp_path / "labels.jsonl").write_text("\n".join(lines))
    chat_settings |= {"task": "classification", "model": {"model_path": str(model)}, "lora": {"r": 2}}
    chat_settings["data"] |= {"train_path": str(tmp_path / "labels.jsonl"), "max_seq_len": None}
    chat_settings["train"] |= {"max_steps": 1}
    code, _, err = train()
    assert (code, err) == (0, "")
    assert "max_seq_len: 48" in (tmp_path / "out" / "config.yaml").read_text()
    adapter = tmp_path / "out" / "hf"
    assert json.loads((adapter / "adapter_config.json").read_text())["modules_to_save"] == ["classifier"]
    names = set(load_file(adapter / "adapter_model.safetensors"))
    assert any("classifier" in name for name in names)
    assert any("attn.c_attn.lora_A" in name for name in names), "Transformers' Conv1D is a linear layer"


@pytest.mark.parametrize(
    ("given", "positions", "tokenizer", "room", "expected"),
    [
        (None, 4096, 10**30, None, 2048),
        (None, 1024, 10**30, None, 1024),
        (None, None, 512, None, 512),
        (None, 4096, 10**30, 256, 256),
        (3000, 4096, 512, None, 3000),
    ],
)
def test_sample_length(given, positions, tokenizer, room, expected):
    config = SimpleNamespace(max_position_embeddings=positions)
    config.get_text_config = lambda: config
    data = DataConfig(max_seq_len=given, max_tokens_per_batch=room)
    set_sample_length(data, config, SimpleNamespace(model_max_length=tokenizer))
    assert data.sample_length == data.max_seq_len == expected


def test_bad_labels_are_located(chat_settings, train, tmp_path):
    file = tmp_path / "labels.jsonl"
    file.write_text('{"text": "a", "label": "x"}\n{"text": "b", "label": "y"}\n{"text": "c"}\n')
    chat_settings["task"] = "classification"
    chat_settings["data"] |= {"train_path": str(file), "label_names": ["x", "z"]}
    code, _, err = train()
    assert code == 2
    assert f"{file}, line 2: label is 'y', which is not one of the 2 labels (x, z)" in err
    assert f"{file}, line 3: no label; it has text" in err
    chat_settings["data"]["label_names"] = ["x", "x"]
    assert "needs at least two different labels\n  found: x, x" in train()[2]
    del chat_settings["data"]["label_names"]
    for label, message in (("1", "at least two different labels\n  found: LABEL_0"), ("0.5", "neither strings nor")):
        file.write_text(f'{{"text": "a", "label": {label}}}\n'.replace("1", "0"))
        assert message in train()[2]
    file.write_text('{"text": " ", "label": "x"}\n{"text": 1, "label": "y"}\n{"text": "b", "label": "y"}\n')
    _, _, err = train()
    assert f"{file}, line 1: text is empty\n" in err
    assert f"{file}, line 2: text is not a text\n" in err
    words = [["a", None], ["a", "\ud83d"], ["a", "b"]]
    file.write_text("".join(json.dumps({"tokens": texts, "tags": ["x", "y"]}) + "\n" for texts in words))
    _, _, err = train()
    assert f"{file}, line 1: tokens[1] is not a text\n" in err
    assert f"{file}, line 2: tokens[1] holds \\ud83d, half of a surrogate pair" in err
    file.write_text('{"text": "a", "label": "x"}\n{\n{"text": "b", "label": "y"}\n')
    code, _, err = train()
    assert code == 2
    assert f"{file}, line 2: not JSON" in err
    assert "data.on_bad_sample: skip" in err
    code, out, _ = train("--train.max_steps", "1", "--data.on_bad_sample", "skip")
    assert code == 0
    assert "; 1 samples left out: malformed" in out


def save_to_disk(folder, rows, features=None):
    """Write what `datasets.Dataset.save_to_disk` writes."""
    folder.mkdir(parents=True)
    table = pa.table(rows)
    if features:
        info = {"info": {"features": features}}
        table = table.replace_schema_metadata({"huggingface": json.dumps(info)})
    half = len(table) // 2
    for number, part in enumerate((table[:half], table[half:])):
        with pa.ipc.new_stream(str(folder / f"data-{number:05d}-of-00002.arrow"), table.schema) as stream:
            stream.write_table(part, max_chunksize=3)
    files = [{"filename": f"data-{number:05d}-of-00002.arrow"} for number in range(2)]
    (folder / "state.json").write_text(json.dumps({"_data_files": files, "_split": None}))
    (folder / "dataset_info.json").write_text("{}")


def test_large_number_is_not_a_class(tokenizer, tmp_path):
    file = tmp_path / "labels.jsonl"
    file.write_text('{"text": "a", "label": 1000000}\n{"text": "b", "label": 3}\n')
    encoder = LabelEncoder(tokenizer, 64)
    encoder.inspect(file, "auto", [])
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match="1,000,001 different labels"):
            find_label_names(encoder, [file], "auto")
        # A name for each number would take 60 MB, and of a timestamp more than the machine has.
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


def test_saved_datasets_and_their_splits(chat_settings, train, tmp_path):
    features = {"text": {"_type": "Value"}, "label": {"names": ["bad", "good"], "_type": "ClassLabel"}}
    for split, count in (("train", 20), ("validation", 6)):
        rows = {"text": ["abc"[i % 2] * 3 for i in range(count)], "label": [i % 2 for i in range(count)]}
        save_to_disk(tmp_path / "saved" / split, rows, features)
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train", "validation"]}')
    chat_settings["task"] = "classification"
    chat_settings["data"] |= {"train_path": str(tmp_path / "saved"), "eval_path": str(tmp_path / "saved")}
    chat_settings["train"] |= {"max_steps": 2, "eval_steps": 2}
    code, out, err = train()
    assert (code, err) == (0, "")
    assert "20 samples" in out
    config = json.loads((tmp_path / "out" / "hf" / "config.json").read_text())
    assert config["id2label"] == {"0": "bad", "1": "good"}


def test_settings_that_the_task_cannot_use(chat_settings, train):
    chat_settings["data"] |= {"split_special_tokens": True, "chat_template": "missing.jinja"}
    chat_settings["evaluation"] = {"best_metric": "f1", "prompts": ["x"], "early_stopping_patience": 0}
    code, _, err = train()
    assert code == 2
    for line in (
        "data.split_special_tokens is for task pretrain, and task is sft",
        "data.chat_template: no such file: missing.jinja",
        "evaluation.best_metric=f1 is for task classification",
        "evaluation.prompts needs train.eval_steps",
        "evaluation.early_stopping_patience=0 must be at least 1",
    ):
        assert line in err


def test_run_without_a_yaml(chat_settings, tmp_path, capsys):
    from opslot.trainer import cli_train

    arguments = ["--task", "sft", "--train.logging.tensorboard", "false", "--train.max_steps", "1"]
    arguments += ["--model.config_path", chat_settings["model"]["config_path"], "--data.max_seq_len", "64"]
    arguments += ["--data.train_path", chat_settings["data"]["train_path"], "--train.output_dir", str(tmp_path / "cli")]
    assert cli_train([*arguments, "--data.cache_dir", str(tmp_path / "cache")]) == 0
    assert "load it with: AutoModelForCausalLM" in capsys.readouterr().out
    config = load_config(tmp_path / "cli" / "config.yaml")
    assert config.task == "sft"
    assert load_config(["--task", "sft"]).task == "sft"
    assert "task: sft" in to_yaml(config)


def test_compressed_chat_data(chat_settings, train, tmp_path):
    text = Path(chat_settings["data"]["train_path"]).read_bytes()
    packed = tmp_path / "chat.jsonl.gz"
    packed.write_bytes(gzip.compress(text))
    chat_settings["data"]["train_path"] = str(packed)
    chat_settings["train"]["max_steps"] = 1
    code, out, err = train()
    assert (code, err) == (0, "")
    assert "tokens in 24 samples" in out


def test_settings_of_another_task_are_warned_about(settings, train):
    settings["data"] |= {"train_on": "last", "label_names": ["a"], "on_bad_sample": "skip"}
    settings["train"]["max_steps"] = 1
    code, out, _ = train()
    assert code == 0
    assert "warning: data.train_on has no effect on task pretrain; it is for task sft" in out
    assert "warning: data.label_names has no effect on task pretrain; it is for task classification" in out
    assert "warning: data.on_bad_sample has no effect on task pretrain" in out


USER, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
# Writes the number of turns first, so that it differs with and without an assistant's turn.
COUNTING = "{{ messages | length }}" + TEMPLATE
STRICT = "{% for m in messages if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endfor %}" + TEMPLATE


@pytest.mark.parametrize(
    ("template", "record", "message", "hint"),
    [
        (COUNTING, {"messages": [USER, ANSWER]}, "the trained part is unknown", "{% generation %}"),
        (STRICT, {"messages": [{**USER, "role": "tool"}, ANSWER]}, "the chat template rejects it: no tools", ""),
        (TEMPLATE, {"messages": [USER, {**ANSWER, "content": ""}]}, "messages[1]: the assistant's turn is empty", ""),
        (TEMPLATE, {"messages": [USER, {**ANSWER, "content": "x" * 90}]}, "more than data.max_seq_len=64", "truncate"),
        (TEMPLATE, {"prompt": "a", "completion": "b"}, "no messages, which the file's first record has", ""),
    ],
    ids=["unknown trained part", "role", "empty turn", "too long", "other columns"],
)
def test_bad_chat_data_is_one_error_or_counted(chat_settings, train, tmp_path, template, record, message, hint):
    """The error has the sample, its file, and a hint; where configured, the sample is left out and counted."""
    (tmp_path / "template.jinja").write_text(template)
    file = tmp_path / "chat.jsonl"
    lines = file.read_text().splitlines()
    file.write_text("\n".join([*lines[:2], json.dumps(record), *lines[2:]]))
    chat_settings["data"] |= {"chat_template": str(tmp_path / "template.jinja"), "packing": True}
    code, _, error = train("--train.max_steps", "1")
    assert code == 2
    assert error.count("opslot: error: ") == 1
    assert f"{file}, line {1 if template is COUNTING else 3}: " in error
    assert message in error
    (found,) = [line for line in error.splitlines() if line.startswith("  hint: ")]
    assert "skip" in found
    assert hint in error
    if template is not COUNTING:
        code, out, _ = train("--train.max_steps", "1", "--data.on_bad_sample", "skip", "--data.long_samples", "skip")
        assert code == 0
        assert "in 24 samples" in out
        assert f"; 1 samples left out: {'too long' if 'truncate' in hint else 'malformed'}" in out
