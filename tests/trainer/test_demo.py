from pathlib import Path

import pytest
from transformers import AutoTokenizer

from demos import command, sft, text
from opslot._base.errors import ConfigError
from opslot.trainer import load_config
from opslot.trainer.validate import validate

CONFIGS = Path(__file__).parents[2] / "configs"


def test_demo_configuration_is_valid(tmp_path):
    command.clear_output(tmp_path)
    documents = text.write_sources(tmp_path / "data")
    assert len(documents) > 300
    assert any(hidden for _, hidden in documents)
    text.train_tokenizer([source for source, _ in documents[:60]], tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert len(tokenizer) == text.VOCABULARY == text.MODEL["vocab_size"]
    code = 'def f(x):\n\treturn "ü" + x  # two  spaces\n'
    assert tokenizer.decode(tokenizer(code)["input_ids"]) == code
    assert tokenizer.eos_token_id == text.MODEL["eos_token_id"]
    (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen3_moe"}')
    validate(load_config([str(CONFIGS / "demo.yaml"), *command.path_arguments(tmp_path)]))


def test_demo_outside_of_the_repository_raises_before_it_starts(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert text.main([]) == 2
    assert "no such file: configs/demo.yaml\n  hint: run this in opslot's repository" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def test_demo_removes_only_its_own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(CONFIGS.parent)
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(ConfigError, match="choose another folder with --output"):
        command.clear_output(tmp_path)
    assert text.main(["--output", str(tmp_path)]) == 2
    assert (tmp_path / "thesis.txt").read_text() == "precious"
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text("")
    command.clear_output(tmp_path)
    assert not tmp_path.exists()


def test_chat_demo_is_valid_and_rates_answers(tmp_path):
    held_out = sft.write_inputs(tmp_path)
    config = load_config([str(CONFIGS / "sft_demo.yaml"), *command.path_arguments(tmp_path)])
    validate(config)
    assert config.task == "sft"
    trained = (tmp_path / "data" / "train.jsonl").read_text()
    assert len(held_out) == 100
    assert not any(f'"{question}"' in trained for question, _ in held_out)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert len(tokenizer) <= sft.MODEL["vocab_size"]
    wrong = sft.answer_to("parity", 3).replace("odd", "even")
    assert sft.rates(
        [("q", sft.answer_to("after", 3)), ("q", sft.answer_to("parity", 3))],
        ["<kind>after</kind><answer>4</answer>", wrong],
    ) == (1.0, 0.5)
    assert sft.rates([("q", "a")], ["4"]) == (0.0, 0.0)
