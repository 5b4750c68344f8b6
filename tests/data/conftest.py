import pytest

from opslot.data import open_corpus


@pytest.fixture
def corpus_of(tmp_path, tokenizer):
    """Make a corpus of documents of the given lengths (with <eos>); document i repeats the letter number i."""

    def make(lengths):
        letters = "abcdefghijklmnopqrstuvwxyz"
        file = tmp_path / "corpus.jsonl"
        file.write_text(
            "".join(f'{{"text": "{letters[i % 26] * (length - 1)}"}}\n' for i, length in enumerate(lengths))
        )
        return open_corpus([file], tokenizer, cache_dir=str(tmp_path / "cache"))

    return make
