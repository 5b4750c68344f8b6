import pytest

from opslot._base.errors import DataError, list_problems
from opslot.data.corpus import open_corpus
from opslot.data.encoder import TextEncoder
from opslot.data.records import read_ranges, split_into_shards
from opslot.data.sources import no_text


@pytest.fixture
def corpus_of(tmp_path, tokenizer):
    """Make a corpus of documents of the given lengths (with <eos>); document i repeats the letter number i."""

    def make(lengths):
        letters = "abcdefghijklmnopqrstuvwxyz"
        file = tmp_path / "corpus.jsonl"
        file.write_text(
            "".join(f'{{"text": "{letters[i % 26] * (length - 1)}"}}\n' for i, length in enumerate(lengths))
        )
        return open_corpus([file], TextEncoder(tokenizer), cache_dir=str(tmp_path / "cache"))

    return make


@pytest.fixture
def read_documents(tokenizer):
    """Read the documents of files; raises all problems as one DataError."""

    def read(files, text_field="text", sample_by="document"):
        problems = []
        encoder = TextEncoder(tokenizer, text_field)
        for file in files:
            encoder.inspect(file, "auto", problems)
        shards = [] if problems else split_into_shards(files, encoder.columns, 4 << 20, problems, sample_by=sample_by)
        documents = [text for shard in shards for text in read_ranges(shard, text_field, problems)]
        if not problems and not documents:
            problems.append(no_text(files))
        if problems:
            raise DataError(list_problems("the data cannot be read", problems))
        return documents

    return read
