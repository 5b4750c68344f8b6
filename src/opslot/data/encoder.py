"""From records to tokens: the interface, and the encoder of plain text."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import numpy as np

from opslot._base.errors import DataError
from opslot._base.logging import get_logger
from opslot.data.chat_columns import missing_text
from opslot.data.collation import LABELED
from opslot.data.locations import ByteRange, Location
from opslot.data.records import columns_in, read_ranges, read_records

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")

logger = get_logger(__name__)

# Samples that are left out, of each process.
_MOST_LOGGED = 10
_BATCH_CHARACTERS = 1 << 20
# Names of Arrow's string types.
STRINGS = ("string", "large_string", "string_view")


class SampleError(ValueError):
    """A sample that cannot be trained on, without its location."""


class MediaDocument(NamedTuple):
    """A document with images, video or audio.

    Attributes:
        tokens: `LABELED`, with the placeholders of the media.
        extra: what its features are computed from when it is in a batch.
        cost: estimated FLOPs of the encoders of its media, in tokens of the language model.
    """

    tokens: np.ndarray
    extra: bytes
    cost: float


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

    def encode(self, ranges: Sequence[ByteRange], problems: list[str], counts: Counter[str]) -> Iterator[Any]:
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
            return
        # A malformed record is reported when it is read, with its line.
        found = columns_in(file, format, [])
        if found is not None and found.first is not None and self.text_field not in found.first:
            # Once for the file: the other records have the same fields.
            problems.append(f"{file}: {missing_text(self.text_field, found.names, 'field')}")

    def identity(self) -> dict[str, Any]:
        return {
            "model.tokenizer_path": f"content {tokenizer_digest(self.tokenizer)}",
            "data.text_field": self.text_field,
            "data.append_eos": self.append_eos,
            "data.split_special_tokens": self.split_special_tokens,
        }

    def encode(
        self, ranges: Sequence[ByteRange], problems: list[str], counts: Counter[str]
    ) -> Iterator[list[np.ndarray]]:
        end = [self.tokenizer.eos_token_id] if self.append_eos else []
        options = {"split_special_tokens": True} if self.split_special_tokens else {}
        for texts in batches(read_ranges(ranges, self.text_field, problems), len):
            lists = self.tokenizer(texts, return_attention_mask=False, verbose=False, **options)["input_ids"]
            documents = (ids if ids[-1:] == end else ids + end for ids in lists)
            yield [np.array(ids, dtype=self.dtype) for ids in documents if ids]


class SampleEncoder(ABC):
    """Base class of encoders of samples, of which a record gives one or several, as tokens with labels.

    Args:
        max_seq_len, long_samples, on_bad_sample: as in `DataConfig`.

    Attributes:
        batch_size: samples are tokenized in batches of about as many characters.
    """

    batch_size = _BATCH_CHARACTERS

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        max_seq_len: int,
        *,
        long_samples: str = "error",
        on_bad_sample: str = "error",
    ) -> None:
        self.tokenizer: Any = tokenizer
        self.max_seq_len = max_seq_len
        self.long_samples = long_samples
        self.on_bad_sample = on_bad_sample
        self.columns: dict[Path, list[str]] = {}
        self.dtype: Any = LABELED
        self._logged = 0

    @abstractmethod
    def samples(self, where: Location, record: Mapping[str, Any]) -> list[Any]:
        """The samples of a record; usually one.

        Raises:
            SampleError: a malformed record.
        """

    @abstractmethod
    def size_of(self, sample: Any) -> int:
        """Characters of a sample."""

    @abstractmethod
    def documents(self, batch: list[tuple[Location, Any]], problems: list[str], counts: Counter[str]) -> Iterator[Any]:
        """The documents of the samples that are kept."""

    def identity(self) -> dict[str, Any]:
        return {
            "model.tokenizer_path": f"content {tokenizer_digest(self.tokenizer)}",
            "data.long_samples": self.long_samples,
            "data.on_bad_sample": self.on_bad_sample,
            "data.max_seq_len": self.max_seq_len,
        }

    def encode(self, ranges: Sequence[ByteRange], problems: list[str], counts: Counter[str]) -> Iterator[list[Any]]:
        malformed: list[str] = [] if self.on_bad_sample == "skip" else problems
        samples = self._samples(ranges, problems, malformed)
        for batch in batches(samples, lambda located: self.size_of(located[1]), self.batch_size):
            yield list(self.documents(batch, problems, counts))
        if self.on_bad_sample == "skip" and malformed:
            counts["malformed"] += len(malformed)
            self._log(malformed)

    def _log(self, malformed: list[str]) -> None:
        """Log the first samples that are left out; the run shows the number of all."""
        for problem in malformed[: _MOST_LOGGED - self._logged]:
            logger.warning("left out (data.on_bad_sample: skip): %s", problem)
        self._logged += min(len(malformed), _MOST_LOGGED - self._logged)

    def _samples(
        self, ranges: Sequence[ByteRange], problems: list[str], malformed: list[str]
    ) -> Iterator[tuple[Location, Any]]:
        for where, record in read_records(ranges, self.columns, problems, malformed):
            try:
                found = self.samples(where, record)
            except SampleError as error:
                malformed.append(f"{where}: {error}")
                continue
            yield from ((where, sample) for sample in found)

    def limited(
        self,
        where: Location,
        tokens: Any,
        problems: list[str],
        counts: Counter[str],
        *,
        can_truncate: bool = True,
        other_fix: str = "",
    ) -> Any:
        """At most `max_seq_len` of `tokens`, according to `long_samples`; None where the sample is left out.

        Args:
            problems: receives a sample that is too long, if that is an error.
            counts: receives samples that are truncated or left out.
            can_truncate: False where the tokens after `max_seq_len` are needed; such samples are left out.
            other_fix: what else makes the sample shorter, for the error.
        """
        if len(tokens) <= self.max_seq_len:
            return tokens
        if self.long_samples == "error":
            problems.append(
                f"{where}: {len(tokens)} tokens, more than data.max_seq_len={self.max_seq_len}; increase it, "
                f"{other_fix}or set data.long_samples to truncate or skip"
            )
            return None
        truncate = self.long_samples == "truncate" and can_truncate
        counts["truncated" if truncate else "too long"] += 1
        return tokens[: self.max_seq_len] if truncate else None


def text_column_problem(schema: Any, text_field: str) -> str | None:
    """Why a table's column is not a column of texts."""
    import pyarrow as pa

    if text_field not in schema.names:
        return missing_text(text_field, schema.names, "column")
    kind = schema.field(text_field).type
    values = kind.value_type if pa.types.is_dictionary(kind) else kind
    return None if str(values) in STRINGS else f"column {text_field!r} holds {kind}, not strings"


def batches(items: Iterable[T], size_of: Callable[[T], int], limit: int = _BATCH_CHARACTERS) -> Iterator[list[T]]:
    """Lists of consecutive items of about `limit` characters."""
    batch: list[T] = []
    size = 0
    for item in items:
        batch.append(item)
        size += size_of(item)
        if size >= limit:
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
