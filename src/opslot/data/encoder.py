"""From records to tokens: the interface, and the encoder of plain text."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from opslot._base.errors import DataError
from opslot.data.locations import Location
from opslot.data.records import ByteRange, columns_in, read_ranges, read_records

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BATCH_CHARACTERS = 1 << 20
# Names of Arrow's string types.
STRINGS = ("string", "large_string", "string_view")


class SampleError(ValueError):
    """A sample that cannot be trained on, without its location."""


class Encoder(Protocol):
    """Turns the records of files into documents of tokens; pickled to the processes that tokenize ahead.

    Attributes:
        columns: columns to read of each inspected file.
        dtype: of the documents: unsigned integers, or `opslot.data.collation.LABELED` for tokens with labels.
    """

    columns: dict[Path, list[str]]
    dtype: Any

    def inspect(self, file: Path, format: str, problems: list[str]) -> None:
        """Set `columns` of a file; errors are appended to `problems`."""

    def identity(self) -> dict[str, Any]:
        """What determines the documents other than the files, by configuration field."""

    def encode(
        self, ranges: Sequence[ByteRange], sample_by: str, problems: list[str], counts: Counter[str]
    ) -> Iterator[Any]:
        """Documents of `ranges` (arrays, or each a `MediaDocument`), in batches.

        `counts` receives the number of samples that were changed or left out.
        """


class TextEncoder:
    """Documents of one text field, each with an end-of-sequence token.

    Args:
        text_field, append_eos, split_special_tokens: as in `DataConfig`.

    Raises:
        DataError: `append_eos` with a tokenizer that has no end-of-sequence token.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        text_field: str = "text",
        append_eos: bool = True,
        split_special_tokens: bool = False,
    ) -> None:
        if append_eos and tokenizer.eos_token_id is None:
            raise DataError(
                "data.append_eos is on, but the tokenizer has no end-of-sequence token",
                hint="set eos_token in its tokenizer_config.json, or data.append_eos: false",
            )
        self.tokenizer = tokenizer
        self.text_field = text_field
        self.append_eos = append_eos
        self.split_special_tokens = split_special_tokens
        self.columns: dict[Path, list[str]] = {}
        self.dtype: Any = np.uint16 if len(tokenizer) <= 1 << 16 else np.uint32

    def inspect(self, file: Path, format: str, problems: list[str]) -> None:
        self.columns[file] = [self.text_field]
        if file.suffix.lower() in (".parquet", ".arrow") or format in ("parquet", "arrow"):
            found = columns_in(file, format, problems)
            if found is not None and (problem := text_column_problem(found.schema, self.text_field)):
                problems.append(f"{file}: {problem}")
                found = None
            if found is None:
                self.columns[file] = []

    def identity(self) -> dict[str, Any]:
        return {
            "model.tokenizer_path": f"content {tokenizer_digest(self.tokenizer)}",
            "data.text_field": self.text_field,
            "data.append_eos": self.append_eos,
            "data.split_special_tokens": self.split_special_tokens,
        }

    def encode(
        self, ranges: Sequence[ByteRange], sample_by: str, problems: list[str], counts: Counter[str]
    ) -> Iterator[list[np.ndarray]]:
        end = [self.tokenizer.eos_token_id] if self.append_eos else []
        options = {"split_special_tokens": True} if self.split_special_tokens else {}
        for texts in batches(read_ranges(ranges, self.text_field, sample_by, problems)):
            lists = self.tokenizer(texts, return_attention_mask=False, verbose=False, **options)["input_ids"]
            documents = (ids if ids[-1:] == end else ids + end for ids in lists)
            yield [np.array(ids, dtype=self.dtype) for ids in documents if ids]


def records_of(
    encoder: Any, ranges: Sequence[ByteRange], sample_by: str, problems: list[str], counts: Counter[str]
) -> Iterator[tuple[Location, dict[str, Any]]]:
    """`read_records` with the columns of an encoder; malformed ones are counted if its `on_bad_sample` is "skip"."""
    if encoder.on_bad_sample != "skip":
        yield from read_records(ranges, encoder.columns, sample_by, problems)
        return
    malformed: list[str] = []
    yield from read_records(ranges, encoder.columns, sample_by, problems, malformed)
    if malformed:
        counts["malformed"] += len(malformed)


def limit_length(
    tokens: Any,
    max_seq_len: int,
    long_samples: str,
    counts: Counter[str],
    *,
    can_truncate: bool = True,
    other_fix: str = "",
) -> Any:
    """At most `max_seq_len` of `tokens`, according to `data.long_samples`; None where the sample is left out.

    Args:
        counts: receives samples that are truncated or left out.
        can_truncate: False where the tokens after `max_seq_len` are needed; such samples are left out.
        other_fix: what else makes the sample shorter, for the error.

    Raises:
        SampleError: the sample is too long, and `long_samples` is "error".
    """
    if len(tokens) <= max_seq_len:
        return tokens
    if long_samples == "error":
        raise SampleError(
            f"{len(tokens)} tokens, more than data.max_seq_len={max_seq_len}; increase it, {other_fix}or set "
            "data.long_samples to truncate or skip"
        )
    truncate = long_samples == "truncate" and can_truncate
    counts["truncated" if truncate else "too long"] += 1
    return tokens[:max_seq_len] if truncate else None


def text_column_problem(schema: Any, text_field: str) -> str | None:
    """Why a table's column is not a column of texts."""
    import pyarrow as pa

    if text_field not in schema.names:
        return (
            f"no column {text_field!r}; it has {', '.join(schema.names)}. "
            "Set data.text_field to the column that holds the text"
        )
    kind = schema.field(text_field).type
    values = kind.value_type if pa.types.is_dictionary(kind) else kind
    return None if str(values) in STRINGS else f"column {text_field!r} holds {kind}, not strings"


def batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """Lists of consecutive texts of about a million characters."""
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Digest of what the tokenizer computes."""
    rust = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = rust.to_str() if rust is not None else repr((type(tokenizer), sorted(tokenizer.get_vocab().items())))
    return digest(repr((vocabulary, tokenizer.eos_token_id)))


def digest(text: str) -> str:
    """A short digest that names a text in a dataloader state."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
