"""Documents as tokens, computed once and kept on disk."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from opslot._base.errors import DataError
from opslot._base.logging import get_logger
from opslot.data.sources import read_documents

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

logger = get_logger(__name__)

# Part of every fingerprint: raise it when the same text must become other tokens.
_FORMAT = 1
_BATCH_CHARACTERS = 1 << 20


class TokenCorpus:
    """Tokenized documents, memory-mapped: any piece of any document at once, however large the corpus.

    Attributes:
        lengths: tokens in each document, int64 [documents].
        fingerprint: names the texts, the tokenizer and the way from one to the other.
    """

    def __init__(self, dataset: Dataset, fingerprint: str) -> None:
        import pyarrow.compute as pc

        self._column = dataset.data.column("input_ids")
        self.lengths: np.ndarray = pc.list_value_length(self._column).to_numpy().astype(np.int64)
        self.fingerprint = fingerprint

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """Tokens in all documents, end-of-sequence tokens included."""
        return int(self.lengths.sum())

    def tokens(self, document: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Tokens [start, stop) of a document, int32, without a copy."""
        return self._column[document].values[start:stop].to_numpy()

    def counts(self, vocab_size: int) -> np.ndarray:
        """How often each token occurs, int64 [vocab_size]."""
        total = np.zeros(vocab_size, dtype=np.int64)
        for chunk in self._column.chunks:
            total += np.bincount(chunk.flatten().to_numpy(), minlength=vocab_size)
        return total


def tokenize_files(
    files: Sequence[Path],
    tokenizer: PreTrainedTokenizerBase,
    *,
    text_field: str = "text",
    sample_by: str = "document",
    append_eos: bool = True,
    cache_dir: str | None = None,
) -> TokenCorpus:
    """Tokenize `files`, or open what an earlier run made of the same files with the same tokenizer.

    Raises:
        DataError: every malformed place in the files, a tokenizer without the end-of-sequence token it should append,
            or a cache folder that cannot be written.
    """
    import datasets

    if append_eos and tokenizer.eos_token_id is None:
        raise DataError(
            "data.append_eos is on, but the tokenizer has no end-of-sequence token\n"
            "  to do: set eos_token in its tokenizer_config.json, or data.append_eos: false"
        )
    fingerprint = _fingerprint(files, tokenizer, text_field, sample_by, append_eos)
    # Rust's own threads tokenize a batch; once used, a later fork warns unless this is said.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    try:
        with _quiet(datasets):
            dataset = datasets.Dataset.from_generator(
                _token_rows,
                features=datasets.Features({"input_ids": datasets.LargeList(datasets.Value("int32"))}),
                gen_kwargs={
                    "documents": _Documents(files, text_field, sample_by),
                    "tokenizer": tokenizer,
                    "eos": tokenizer.eos_token_id if append_eos else None,
                },
                fingerprint=fingerprint,
                cache_dir=cache_dir,
            )
    except (datasets.exceptions.DatasetGenerationError, OSError) as error:
        cause = error.__cause__ if isinstance(error, datasets.exceptions.DatasetGenerationError) else error
        if isinstance(cause, DataError):
            raise cause from None
        if not isinstance(cause, OSError):
            raise
        folder = cache_dir or datasets.config.HF_DATASETS_CACHE
        raise DataError(
            f"tokenized text cannot be kept in {folder}: {cause}\n  to do: set data.cache_dir to a folder with room"
        ) from error
    corpus = TokenCorpus(dataset, fingerprint)
    logger.info("%s documents, %s tokens from %s files", f"{len(corpus):,}", f"{corpus.num_tokens:,}", len(files))
    return corpus


class _Documents:
    """Re-iterable `read_documents`: datasets wants arguments that can be pickled, not a generator."""

    def __init__(self, files: Sequence[Path], text_field: str, sample_by: str) -> None:
        self.arguments = (list(files), text_field, sample_by)

    def __iter__(self) -> Iterator[str]:
        return read_documents(*self.arguments)


def _token_rows(
    documents: _Documents, tokenizer: PreTrainedTokenizerBase, eos: int | None
) -> Iterator[dict[str, np.ndarray]]:
    end = [] if eos is None else [eos]
    for batch in _batches(documents):
        for ids in tokenizer(batch, return_attention_mask=False, verbose=False)["input_ids"]:
            ended = ids if ids[-1:] == end else ids + end
            if ended:
                yield {"input_ids": np.array(ended, dtype=np.int32)}


def _batches(documents: _Documents) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for text in documents:
        batch.append(text)
        size += len(text)
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _fingerprint(files: Sequence[Path], tokenizer: PreTrainedTokenizerBase, *settings: Any) -> str:
    rust = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = rust.to_str() if rust is not None else repr((type(tokenizer), sorted(tokenizer.get_vocab().items())))
    digest = hashlib.sha256()
    for part in (_FORMAT, vocabulary, tokenizer.eos_token_id, *settings):
        digest.update(repr(part).encode())
    for file in files:
        stat = file.stat()
        digest.update(f"{file.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:32]


@contextlib.contextmanager
def _quiet(datasets: Any) -> Iterator[None]:
    """No progress bars and no log lines of datasets inside: the trainer speaks for itself."""
    shown = datasets.utils.logging.is_progress_bar_enabled()
    verbosity = datasets.utils.logging.get_verbosity()
    datasets.disable_progress_bars()
    datasets.utils.logging.set_verbosity_error()
    try:
        yield
    finally:
        datasets.utils.logging.set_verbosity(verbosity)
        if shown:
            datasets.enable_progress_bars()
