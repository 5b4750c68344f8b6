import pytest
from transformers import AutoTokenizer

from opslot._base.errors import ConfigError
from opslot.trainer import demo, load_config
from opslot.trainer.validate import validate


def test_demo_configuration_is_valid(tmp_path):
    demo.clear_output(tmp_path)
    documents = demo.write_sources(tmp_path / "data")
    assert len(documents) > 300
    assert any(hidden for _, hidden in documents)
    demo.train_tokenizer([text for text, _ in documents[:60]], tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert len(tokenizer) == demo.VOCABULARY == demo.MODEL["vocab_size"]
    code = 'def f(x):\n\treturn "ü" + x  # two  spaces\n'
    assert tokenizer.decode(tokenizer(code)["input_ids"]) == code
    assert tokenizer.eos_token_id == demo.MODEL["eos_token_id"]
    (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen3_moe"}')
    validate(load_config(demo.write_config(tmp_path)))


def test_demo_removes_only_its_own_folder(tmp_path):
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(ConfigError, match="choose another folder with --output"):
        demo.clear_output(tmp_path)
    assert demo.main(["--output", str(tmp_path)]) == 2
    assert (tmp_path / "thesis.txt").read_text() == "precious"
    (tmp_path / "demo.yaml").write_text("")
    demo.clear_output(tmp_path)
    assert not tmp_path.exists()
