"""Documents as tokens, block by block: each block is tokenized when it is needed, once, and kept on disk."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from opslot._base.errors import DataError, list_problems
from opslot._base.logging import get_logger
from opslot.data.sources import Span, no_text, read_spans, split_files
from opslot.data.tokenizing import TokenizingProcesses

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = get_logger(__name__)

# Part of every fingerprint: raise it when the same text must become other tokens, or lie elsewhere.
_FORMAT = 2
# Text of a block: a few seconds of tokenizing on one core, and what a kill can cost.
BLOCK_BYTES = 4 << 20
_BATCH_CHARACTERS = 1 << 20
_SECONDS_BETWEEN_LOOKS = 0.05
# A wait that is worth a word.
_LONG_SECONDS = 10.0


class TokenBlock:
    """Tokenized documents of one block, memory-mapped.

    Attributes:
        lengths: tokens in each document, int64 [documents].
    """

    def __init__(self, path: Path) -> None:
        import pyarrow as pa

        column = pa.ipc.open_file(pa.memory_map(str(path))).get_batch(0).column(0)
        self._starts = column.offsets.to_numpy()
        self._tokens = column.values.to_numpy()
        self.lengths: np.ndarray = np.diff(self._starts)

    def tokens(self, document: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Tokens [start, stop) of a document, unsigned integers, without a copy."""
        return self._tokens[self._starts[document] : self._starts[document + 1]][start:stop]

    def counts(self, vocab_size: int) -> np.ndarray:
        """How often each token occurs, int64 [vocab_size]."""
        return np.bincount(self._tokens, minlength=vocab_size)


class TokenCorpus:
    """Blocks of documents, known from the start, whose tokens are there when they are asked for.

    Processes that share the folder share the work: whoever needs a block that is not there writes it, unless another is
    at it. A block is there whole or not at all.

    Args:
        blocks: the text of each, from `split_files`.
        stamps: size in bytes and time of change (ns) of each file, which must not change while it is read.
        tokenize: texts to token numbers.
        folder: where blocks are kept; belongs to these files, this tokenizer and these settings alone.
        text_field, sample_by: as in `DataConfig`.
        dtype: of the kept tokens.

    Attributes:
        sizes: bytes of text in each block, int64 [blocks].
        fingerprint: names the texts, the tokenizer and the way from one to the other.
    """

    def __init__(
        self,
        blocks: Sequence[Sequence[Span]],
        stamps: Mapping[Path, tuple[int, int]],
        tokenize: Callable[[list[str]], Iterable[list[int]]],
        folder: Path,
        fingerprint: str,
        *,
        text_field: str = "text",
        sample_by: str = "document",
        dtype: type[np.unsignedinteger] = np.uint32,
    ) -> None:
        self.fingerprint = fingerprint
        self.sizes = np.array([sum(span.size for span in block) for block in blocks], dtype=np.int64)
        self._blocks = blocks
        self._tokenize = tokenize
        self._folder = folder
        self._text_field = text_field
        self._sample_by = sample_by
        self._dtype = dtype
        self._stamps = stamps
        self._there: set[int] = set()
        self._processes: TokenizingProcesses | None = None
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            self._there = {int(name[: -len(_SUFFIX)]) for name in os.listdir(folder) if name.endswith(_SUFFIX)}

    def __getstate__(self) -> dict[str, Any]:
        # Processes belong to the one that started them.
        return {**self.__dict__, "_processes": None}

    @property
    def is_complete(self) -> bool:
        """Whether every block is there."""
        return all(self._is_there(number) for number in range(len(self.sizes)))

    def block(self, number: int) -> TokenBlock:
        """The documents of a block, tokenized now if they are not there."""
        self.prepare([number])
        try:
            return TokenBlock(self._path(number))
        except (OSError, ValueError) as error:
            raise DataError(
                f"tokenized text is missing or damaged: {self._path(number)}: {error}",
                hint=(
                    f"remove {self._folder} and run again with train.resume_from: latest; the text is tokenized anew"
                ),
            ) from error

    def prepare(self, numbers: Sequence[int] | np.ndarray, check: Callable[[], None] | None = None) -> None:
        """Return when these blocks are there; those that no other process is at are tokenized here.

        Args:
            check: called every second or so; raises to give up.

        Raises:
            DataError: malformed text, a file that changed, or a cache folder that cannot be written.
        """
        look = check or self.check_processes
        began = time.monotonic()
        while absent := [number for number in numbers if not self._is_there(number)]:
            written = sum([self._write_unless_others_do(number, look) for number in absent])
            if not written:
                look()
                time.sleep(_SECONDS_BETWEEN_LOOKS)
        waited = time.monotonic() - began
        if check is None and waited > _LONG_SECONDS:
            logger.info("waited %.0f s for text to be tokenized; data.num_workers says how many do it ahead", waited)

    def start_processes(self, count: int, numbers: Sequence[int]) -> None:
        """Let `count` processes tokenize the blocks `numbers` in this order, ahead of need."""
        if count and not all(self._is_there(number) for number in numbers):
            self._processes = TokenizingProcesses(self, numbers, count)

    def check_processes(self) -> None:
        """Raise what a process found wrong, although nobody asked for that block yet.

        Raises:
            DataError: see `prepare`; also for a process that was killed.
        """
        if self._processes is not None:
            self._processes.check()

    def close(self) -> None:
        """End the processes; a block that one was at is done again by the next run."""
        if self._processes is not None:
            self._processes.stop()
            self._processes = None

    def num_tokens(self) -> int:
        """Tokens in all documents, end-of-sequence tokens included; tokenizes what is not there."""
        return sum(int(block.lengths.sum()) for block in self._all_blocks())

    def num_documents(self) -> int:
        """Documents that are not blank; tokenizes what is not there."""
        return sum(len(block.lengths) for block in self._all_blocks())

    def counts(self, vocab_size: int) -> np.ndarray:
        """How often each token occurs, int64 [vocab_size]; tokenizes what is not there."""
        total = np.zeros(vocab_size, dtype=np.int64)
        for block in self._all_blocks():
            total += block.counts(vocab_size)
        return total

    def _all_blocks(self) -> Iterator[TokenBlock]:
        self.prepare(range(len(self.sizes)))
        return (self.block(number) for number in range(len(self.sizes)))

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:06d}{_SUFFIX}"

    def _is_there(self, number: int) -> bool:
        if number not in self._there and self._path(number).exists():
            self._there.add(number)
        return number in self._there

    def _write_unless_others_do(self, number: int, check: Callable[[], None]) -> bool:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with _locked(self._folder / "lock", number) as held:
                if held and not self._path(number).exists():
                    self._write(number, check)
                return held
        except OSError as error:
            raise DataError(
                f"tokenized text cannot be kept in {self._folder.parent}: {error}",
                hint="make room there, or set data.cache_dir to a folder that can be written and locked",
            ) from error

    def _write(self, number: int, check: Callable[[], None]) -> None:
        import pyarrow as pa

        documents = self._token_lists(number, check)
        offsets = np.cumsum([0, *map(len, documents)], dtype=np.int64)
        values = np.concatenate([np.empty(0, self._dtype), *documents])
        column = pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(values))
        unfinished = self._path(number).with_suffix(".unfinished")
        try:
            with unfinished.open("wb") as file:
                with pa.ipc.new_file(file, pa.schema({"input_ids": column.type})) as table:
                    table.write_batch(pa.record_batch([column], ["input_ids"]))
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(self._path(number))
        except OSError:
            unfinished.unlink(missing_ok=True)
            raise

    def _token_lists(self, number: int, check: Callable[[], None]) -> list[np.ndarray]:
        spans = self._blocks[number]
        problems: list[str] = []
        self._require_unchanged(spans)
        documents: list[np.ndarray] = []
        for texts in _batches(read_spans(spans, self._text_field, self._sample_by, problems)):
            check()
            documents += [np.array(ids, dtype=self._dtype) for ids in self._tokenize(texts) if ids]
        # A file that changes under the reader makes for malformed text; say the cause.
        self._require_unchanged(spans)
        if not problems and not documents and len(self.sizes) == 1:
            problems.append(no_text(list(self._stamps)))
        if problems:
            raise DataError(list_problems("the data cannot be read", problems))
        return documents

    def _require_unchanged(self, spans: Sequence[Span]) -> None:
        for file in {span.file for span in spans}:
            try:
                found = "it has changed" if _stamp(file) != self._stamps[file] else None
            except OSError as error:
                found = str(error.strerror)
            if found:
                raise DataError(
                    f"{file}: {found} while the run was reading it",
                    hint=(
                        "put it back as it was and go on with train.resume_from: latest, or start a new "
                        "run on what is there now"
                    ),
                )


_SUFFIX = ".arrow"


def open_corpus(
    files: Sequence[Path],
    tokenizer: PreTrainedTokenizerBase,
    *,
    text_field: str = "text",
    sample_by: str = "document",
    append_eos: bool = True,
    cache_dir: str | None = None,
    block_bytes: int = BLOCK_BYTES,
) -> TokenCorpus:
    """The documents of `files`, to be tokenized as they are needed; what an earlier run made of them is there already.

    Args:
        text_field, sample_by, append_eos, cache_dir: as in `DataConfig`.
        block_bytes: text that is tokenized at a time; of a plain text file that is longer, each such part, cut at the
            end of a line, is a document.

    Raises:
        DataError: a file that is gone, parquet files without the text, or a tokenizer without the end-of-sequence token
            it should append.
    """
    if append_eos and tokenizer.eos_token_id is None:
        raise DataError(
            "data.append_eos is on, but the tokenizer has no end-of-sequence token",
            hint="set eos_token in its tokenizer_config.json, or data.append_eos: false",
        )
    _tokenize_with_threads()
    problems: list[str] = []
    try:
        stamps = {file: _stamp(file) for file in files}
        blocks = split_files(files, text_field, block_bytes, problems)
    except OSError as error:
        raise DataError(f"the data cannot be read:\n- {error.filename}: {error.strerror}") from error
    if not problems and not blocks:
        problems.append(no_text(files))
    if problems:
        raise DataError(list_problems("the data cannot be read", problems))
    fingerprint = _fingerprint(stamps, tokenizer, text_field, sample_by, append_eos, block_bytes)
    return TokenCorpus(
        blocks,
        stamps,
        _Tokenize(tokenizer, tokenizer.eos_token_id if append_eos else None),
        (Path(cache_dir).expanduser() if cache_dir else _default_cache()) / f"opslot-{fingerprint}",
        fingerprint,
        text_field=text_field,
        sample_by=sample_by,
        dtype=np.uint16 if len(tokenizer) <= 1 << 16 else np.uint32,
    )


def _tokenize_with_threads() -> None:
    """Unless the user says otherwise, let Rust's own threads tokenize a batch; without a word, a later fork warns."""
    if "TOKENIZERS_PARALLELISM" not in os.environ:
        os.environ["TOKENIZERS_PARALLELISM"] = "true"
        # A forked process would wait for threads that exist in its parent alone.
        os.register_at_fork(after_in_child=lambda: os.environ.update(TOKENIZERS_PARALLELISM="false"))


class _Tokenize:
    """Texts to token numbers with an end; a class, so that other processes can be given it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, eos: int | None) -> None:
        self.tokenizer = tokenizer
        self.end = [] if eos is None else [eos]

    def __call__(self, texts: list[str]) -> list[list[int]]:
        lists = self.tokenizer(texts, return_attention_mask=False, verbose=False)["input_ids"]
        return [ids if ids[-1:] == self.end else ids + self.end for ids in lists]


@contextlib.contextmanager
def _locked(path: Path, number: int) -> Iterator[bool]:
    """Hold the lock of one block; False where another process does. The end of a process, however it comes, frees it.

    Block n's lock is byte n of one file, by POSIX, so it also holds between the machines of a shared file system. A
    process must not take a second one meanwhile: closing the file frees both.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        held = True
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, number)
        except (BlockingIOError, PermissionError):
            held = False
        yield held
    finally:
        os.close(handle)


def _batches(documents: Iterable[str]) -> Iterator[list[str]]:
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


def _stamp(file: Path) -> tuple[int, int]:
    facts = file.stat()
    return facts.st_size, facts.st_mtime_ns


def _default_cache() -> Path:
    """The folder of Hugging Face datasets, without importing them."""
    from huggingface_hub.constants import HF_HOME

    return Path(os.environ.get("HF_DATASETS_CACHE") or Path(HF_HOME) / "datasets").expanduser()


def _fingerprint(stamps: Mapping[Path, tuple[int, int]], tokenizer: PreTrainedTokenizerBase, *settings: Any) -> str:
    rust = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = rust.to_str() if rust is not None else repr((type(tokenizer), sorted(tokenizer.get_vocab().items())))
    digest = hashlib.sha256()
    for part in (_FORMAT, vocabulary, tokenizer.eos_token_id, *settings):
        digest.update(repr(part).encode())
    for file, (size, changed) in stamps.items():
        digest.update(f"{file.resolve()}\0{size}\0{changed}\n".encode())
    return digest.hexdigest()[:32]
