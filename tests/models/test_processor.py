import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from opslot._base.errors import ConfigError
from opslot.models import MODEL_PROCESSOR_REGISTRY, build_processor


@pytest.fixture
def folder(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(tmp_path)
    return tmp_path


def test_a_folder_without_a_processor_holds_a_tokenizer(folder):
    assert build_processor(folder)("a b c")["input_ids"] == [1, 2, 0]


def test_a_registered_class_comes_first(folder, monkeypatch):
    class Mine:
        @classmethod
        def from_pretrained(cls, path, **kwargs):
            return ("mine", path)

    monkeypatch.setattr(MODEL_PROCESSOR_REGISTRY, "_factories", {})
    MODEL_PROCESSOR_REGISTRY.register("MyProcessor")(lambda: Mine)
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": "MyProcessor"}))
    assert build_processor(folder) == ("mine", folder)


def test_bad_folders(tmp_path):
    with pytest.raises(ConfigError, match="no such folder"):
        build_processor(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="holds no processor"):
        build_processor(tmp_path)
