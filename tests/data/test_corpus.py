import json
import os

import numpy as np
import pytest

from opslot._base.errors import ConfigError, DataError
from opslot.data.corpus import open_corpus
from opslot.data.encoder import TextEncoder
from opslot.data.tokenizer import load_tokenizer


def test_tokens_and_end_of_sequence(tmp_path, tokenizer):
    texts = ["hello", "wörld", "x" * 5000]
    for i, text in enumerate(texts):
        (tmp_path / f"{i}.txt").write_text(text)
    files = sorted(tmp_path.glob("*.txt"))
    corpus = open_corpus(files, TextEncoder(tokenizer), cache_dir=str(tmp_path / "cache"))
    shard = corpus.shard(0)
    for i, text in enumerate(texts):
        assert tokenizer.decode(shard.tokens(i)[:-1]) == text
        assert shard.tokens(i)[-1] == tokenizer.eos_token_id
    assert shard.lengths.tolist() == [6, 7, 5001]
    assert (corpus.num_documents(), corpus.num_tokens()) == (3, 5014)
    assert shard.tokens(2, 4998, 9999).tolist() == shard.tokens(2)[4998:].tolist()
    counts = corpus.counts(len(tokenizer))
    assert counts.sum() == 5014
    assert counts[tokenizer.eos_token_id] == 3


def test_cache_is_used_until_a_file_changes(tmp_path, tokenizer, monkeypatch):
    file = tmp_path / "a.txt"
    file.write_text("one")
    cache = str(tmp_path / "cache")
    first = open_corpus([file], TextEncoder(tokenizer), cache_dir=cache)
    old = first.shard(0).tokens(0)
    monkeypatch.setattr("opslot.data.encoder.read_ranges", lambda *_: pytest.fail("read again"))
    again = open_corpus([file], TextEncoder(tokenizer), cache_dir=cache)
    assert again.is_complete
    assert np.array_equal(again.shard(0).tokens(0), old)
    monkeypatch.undo()
    file.write_text("two")
    os.utime(file, ns=(1, 1))
    second = open_corpus([file], TextEncoder(tokenizer), cache_dir=cache)
    assert second.identity != first.identity
    assert not np.array_equal(second.shard(0).tokens(0), old)
    without_end = open_corpus([file], TextEncoder(tokenizer, append_eos=False), cache_dir=cache)
    assert without_end.num_tokens() == second.num_tokens() - 1


def test_malformed_data_leaves_no_cache(tmp_path, tokenizer):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "good"}\nbad\n')
    cache = tmp_path / "cache"
    with pytest.raises(DataError, match=r"a\.jsonl, line 2: not JSON"):
        open_corpus([file], TextEncoder(tokenizer), cache_dir=str(cache)).shard(0)
    assert not list(cache.rglob("*.arrow"))


def test_cache_folder_that_cannot_be_written_raises(tmp_path, tokenizer):
    file = tmp_path / "a.txt"
    file.write_text("one")
    with pytest.raises(DataError, match=r"cannot be written to .*below: "):
        open_corpus([file], TextEncoder(tokenizer), cache_dir=str(file / "below")).shard(0)


def test_tokenizer_without_eos_raises_with_append_eos(tmp_path, tokenizer):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / "tokenizer_config.json").unlink()
    bare = load_tokenizer(tmp_path / "tokenizer")
    assert bare.eos_token_id is None
    file = tmp_path / "a.txt"
    file.write_text("one")
    with pytest.raises(DataError, match="has no end-of-sequence token"):
        TextEncoder(bare)
    assert open_corpus([file], TextEncoder(bare, append_eos=False), cache_dir=str(tmp_path / "c")).num_tokens() == 3


@pytest.mark.parametrize("model_type", ["qwen3", "dbrx"])
def test_folder_without_a_tokenizer_raises(tmp_path, model_type):
    """Transformers makes an empty tokenizer from such a config.json."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(ConfigError, match=r"no tokenizer at .*\n.*found: none of merges\.txt, .*vocab\.json"):
        load_tokenizer(tmp_path)
