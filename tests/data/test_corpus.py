import os

import numpy as np
import pytest

from opslot._base.errors import DataError
from opslot.data import load_tokenizer, open_corpus


def test_tokens_are_the_tokenizers_with_an_end(tmp_path, tokenizer):
    texts = ["hello", "wörld", "x" * 5000]
    for i, text in enumerate(texts):
        (tmp_path / f"{i}.txt").write_text(text)
    files = sorted(tmp_path.glob("*.txt"))
    corpus = open_corpus(files, tokenizer, cache_dir=str(tmp_path / "cache"))
    block = corpus.block(0)
    for i, text in enumerate(texts):
        assert tokenizer.decode(block.tokens(i)[:-1]) == text
        assert block.tokens(i)[-1] == tokenizer.eos_token_id
    assert block.lengths.tolist() == [6, 7, 5001]
    assert (corpus.num_documents(), corpus.num_tokens()) == (3, 5014)
    assert block.tokens(2, 4998, 9999).tolist() == block.tokens(2)[4998:].tolist()
    counts = corpus.counts(len(tokenizer))
    assert counts.sum() == 5014
    assert counts[tokenizer.eos_token_id] == 3


def test_a_corpus_is_made_once_and_again_when_a_file_changes(tmp_path, tokenizer, monkeypatch):
    file = tmp_path / "a.txt"
    file.write_text("one")
    cache = str(tmp_path / "cache")
    first = open_corpus([file], tokenizer, cache_dir=cache)
    old = first.block(0).tokens(0)
    monkeypatch.setattr("opslot.data.corpus.read_spans", lambda *_: pytest.fail("read again"))
    again = open_corpus([file], tokenizer, cache_dir=cache)
    assert again.is_complete
    assert np.array_equal(again.block(0).tokens(0), old)
    monkeypatch.undo()
    file.write_text("two")
    os.utime(file, ns=(1, 1))
    second = open_corpus([file], tokenizer, cache_dir=cache)
    assert second.fingerprint != first.fingerprint
    assert not np.array_equal(second.block(0).tokens(0), old)
    without_end = open_corpus([file], tokenizer, append_eos=False, cache_dir=cache)
    assert without_end.num_tokens() == second.num_tokens() - 1


def test_malformed_data_leaves_no_corpus_behind(tmp_path, tokenizer):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "good"}\nbad\n')
    cache = tmp_path / "cache"
    with pytest.raises(DataError, match=r"a\.jsonl, line 2: not JSON"):
        open_corpus([file], tokenizer, cache_dir=str(cache)).block(0)
    assert not list(cache.rglob("*.arrow"))


def test_a_cache_folder_that_cannot_be_written(tmp_path, tokenizer):
    file = tmp_path / "a.txt"
    file.write_text("one")
    with pytest.raises(DataError, match=r"cannot be kept in .*below: "):
        open_corpus([file], tokenizer, cache_dir=str(file / "below")).block(0)


def test_a_tokenizer_without_end_is_refused_unless_none_is_wanted(tmp_path, tokenizer):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / "tokenizer_config.json").unlink()
    bare = load_tokenizer(tmp_path / "tokenizer")
    assert bare.eos_token_id is None
    file = tmp_path / "a.txt"
    file.write_text("one")
    with pytest.raises(DataError, match="has no end-of-sequence token"):
        open_corpus([file], bare)
    assert open_corpus([file], bare, append_eos=False, cache_dir=str(tmp_path / "c")).num_tokens() == 3
