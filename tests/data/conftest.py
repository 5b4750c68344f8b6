import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from opslot.data import tokenize_files


@pytest.fixture(scope="session")
def tokenizer():
    """One token a byte, and <eos> as number 0."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={"<eos>": 0, **{c: i for i, c in enumerate(alphabet, 1)}}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", clean_up_tokenization_spaces=False)


@pytest.fixture
def corpus_of(tmp_path, tokenizer):
    """Make a corpus of documents of the given lengths (with <eos>); document i repeats the letter number i."""

    def make(lengths):
        letters = "abcdefghijklmnopqrstuvwxyz"
        file = tmp_path / "corpus.jsonl"
        file.write_text(
            "".join(f'{{"text": "{letters[i % 26] * (length - 1)}"}}\n' for i, length in enumerate(lengths))
        )
        return tokenize_files([file], tokenizer, cache_dir=str(tmp_path / "cache"))

    return make
