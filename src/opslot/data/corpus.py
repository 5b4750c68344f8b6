"""Documents as tokens, shard by shard: each shard is tokenized once, when it is needed, and cached on disk."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from opslot._base.errors import DataError, list_problems
from opslot._base.labels import IGNORE_INDEX
from opslot._base.logging import get_logger
from opslot.data.collation import LABELED
from opslot.data.encoder import Encoder, MediaDocument
from opslot.data.locations import ByteRange
from opslot.data.records import split_into_shards
from opslot.data.sources import described_counts, no_text
from opslot.data.tokenizing import TokenizingProcesses

logger = get_logger(__name__)

# Part of every cache key: increase it when the same text must be tokenized differently or is stored differently.
_FORMAT = 12
# Text of a shard: a few seconds of tokenizing on one core.
SHARD_BYTES = 4 << 20
_POLL_SECONDS = 0.05
# Waits longer than this are logged.
_LONG_SECONDS = 10.0
# Content digests read files up to this many bytes in all; of larger corpora, evenly spaced parts.
_DIGEST_BYTES = 256 << 20
_DIGEST_PART = 64 << 10


class TokenShard:
    """Tokenized documents of one shard, memory-mapped.

    Attributes:
        lengths: tokens in each document, int64 [documents].

    Raises:
        ValueError: the file is not what was written.
    """

    def __init__(self, path: Path) -> None:
        import pyarrow as pa

        file = pa.ipc.open_file(pa.memory_map(str(path)))
        batch = file.get_batch(0)
        column = batch.column(0)
        self._starts = column.offsets.to_numpy()
        self._tokens = column.values.to_numpy()
        metadata = file.schema.metadata or {}
        self._extras: Any = None
        self._costs: Any = None
        if batch.num_columns > 1:
            self._extras, self._costs = batch.column(1), batch.column(2)
        if metadata.get(b"crc32") != _checksum(self._starts, self._tokens, self._extras):
            raise ValueError("its checksum differs from the one that was written")
        if self._tokens.dtype == np.uint64:
            self._tokens = self._tokens.view(LABELED)
        self.lengths: np.ndarray = np.diff(self._starts)

    def tokens(self, document: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Tokens [start, stop) of a document, unsigned integers or `LABELED`, without a copy."""
        return self._tokens[self._starts[document] : self._starts[document + 1]][start:stop]

    def extra(self, document: int) -> bytes | None:
        """`MediaDocument.extra` of a document; None without."""
        return None if self._extras is None else self._extras[document].as_py()

    def cost(self, document: int) -> float:
        """`MediaDocument.cost` of a document; 0 without."""
        return 0.0 if self._costs is None else float(self._costs[document].as_py())

    def counts(self, vocab_size: int) -> np.ndarray:
        """Number of occurrences of each token, int64 [vocab_size]."""
        tokens = self._tokens["token"] if self._tokens.dtype == LABELED else self._tokens
        return np.bincount(tokens, minlength=vocab_size)

    @property
    def trained(self) -> int:
        """Number of tokens with a label."""
        if self._tokens.dtype != LABELED:
            return len(self._tokens)
        return int((self._tokens["label"] != IGNORE_INDEX).sum())


class TokenCorpus:
    """Shards of documents, known from the start, that are tokenized on demand.

    Processes that share the cache folder share the work: a missing shard is written by the first process that needs it.
    A shard file exists completely or not at all.

    Args:
        shards: the text of each, from `split_into_shards`.
        stamps: size in bytes and modification time (ns) of each file, which must not change during the run.
        encoder: records to tokens.
        folder: cache folder of these files, this tokenizer and these settings.
        identity: names the texts, the tokenizer and the settings in a checkpoint, for `PackedDataset.identity`.

    Attributes:
        sizes: bytes of text in each shard, int64 [shards].
    """

    def __init__(
        self,
        shards: Sequence[Sequence[ByteRange]],
        stamps: Mapping[Path, tuple[int, int]],
        encoder: Encoder,
        folder: Path,
        identity: dict[str, Any],
    ) -> None:
        self.identity = identity
        self.sizes = np.array([sum(part.size for part in shard) for shard in shards], dtype=np.int64)
        self._shards = shards
        self._encoder = encoder
        self._folder = folder
        self._stamps = stamps
        self._cached: set[int] = set()
        self._processes: TokenizingProcesses | None = None
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            self._cached = {int(name[: -len(_SUFFIX)]) for name in os.listdir(folder) if name.endswith(_SUFFIX)}

    def __getstate__(self) -> dict[str, Any]:
        # Only the process that started the tokenizing processes can join them.
        return {**self.__dict__, "_processes": None}

    @property
    def is_complete(self) -> bool:
        """Whether every shard is tokenized."""
        return all(self._is_cached(number) for number in range(len(self.sizes)))

    def shard(self, number: int) -> TokenShard:
        """The documents of a shard; tokenizes it if needed.

        Raises:
            DataError: see `prepare`; or the cached file is damaged.
        """
        self.prepare([number])
        try:
            return TokenShard(self._path(number))
        except (OSError, ValueError) as error:
            raise DataError(
                f"tokenized text is missing or damaged: {self._path(number)}",
                found=str(error),
                hint=f"delete {self._folder} and set train.checkpoint.resume_from: latest; the text is tokenized again",
            ) from error

    def prepare(self, numbers: Sequence[int] | np.ndarray, check: Callable[[], None] | None = None) -> None:
        """Return when these shards are tokenized; this process tokenizes those that no other process works on.

        Args:
            check: called about every second; raises to give up.

        Raises:
            DataError: malformed text, a file that changed, or a cache folder that cannot be written.
        """
        check_now = check or self.check_processes
        began = time.monotonic()
        while missing := [number for number in numbers if not self._is_cached(number)]:
            written = sum([self._write_unless_locked(number, check_now) for number in missing])
            if not written:
                check_now()
                time.sleep(_POLL_SECONDS)
        waited = time.monotonic() - began
        if check is None and waited > _LONG_SECONDS:
            logger.info("waited %.0f s for tokenization; increase data.num_workers to tokenize ahead", waited)

    def start_processes(self, count: int, numbers: Sequence[int]) -> None:
        """Start `count` processes that tokenize the shards `numbers`, in this order, ahead of need."""
        if count and not all(self._is_cached(number) for number in numbers):
            self._processes = TokenizingProcesses(self, numbers, count)

    def check_processes(self) -> None:
        """Raise the error of a tokenizing process, before its shard is needed.

        Raises:
            DataError: see `prepare`; also for a process that was killed.
        """
        if self._processes is not None:
            self._processes.check()

    def close(self) -> None:
        """Stop the processes; an unfinished shard is tokenized again by the next run."""
        if self._processes is not None:
            self._processes.stop()
            self._processes = None

    def num_tokens(self) -> int:
        """Tokens in all documents, with end-of-sequence tokens; tokenizes what is missing."""
        return sum(int(shard.lengths.sum()) for shard in self._all_shards())

    def num_documents(self) -> int:
        """Documents that are not blank; tokenizes what is missing."""
        return sum(len(shard.lengths) for shard in self._all_shards())

    def counts(self, vocab_size: int) -> np.ndarray:
        """Number of occurrences of each token, int64 [vocab_size]; tokenizes what is missing."""
        total = np.zeros(vocab_size, dtype=np.int64)
        for shard in self._all_shards():
            total += shard.counts(vocab_size)
        return total

    def sample_counts(self) -> Counter[str]:
        """Number of samples that the encoder changed or left out so far, by what was done."""
        cached = (number for number in range(len(self.sizes)) if self._is_cached(number))
        return sum((_sample_counts(self._path(number)) for number in cached), Counter())

    def num_trained(self) -> int:
        """Tokens with a label; tokenizes what is missing."""
        return sum(shard.trained for shard in self._all_shards())

    def _all_shards(self) -> Iterator[TokenShard]:
        self.prepare(range(len(self.sizes)))
        return (self.shard(number) for number in range(len(self.sizes)))

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:06d}{_SUFFIX}"

    def _is_cached(self, number: int) -> bool:
        if number not in self._cached and self._path(number).exists():
            self._cached.add(number)
        return number in self._cached

    def _write_unless_locked(self, number: int, check: Callable[[], None]) -> bool:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with _locked(self._folder / "lock", number) as held:
                if held and not self._path(number).exists():
                    self._write(number, check)
                return held
        except OSError as error:
            raise DataError(
                f"tokenized text cannot be written to {self._folder.parent}: {error}",
                hint="free disk space, or set data.cache_dir to a folder that can be written and locked",
            ) from error

    def _write(self, number: int, check: Callable[[], None]) -> None:
        import pyarrow as pa

        counts: Counter[str] = Counter()
        encoded = self._encode(number, check, counts)
        media = [document for document in encoded if isinstance(document, MediaDocument)]
        documents = [document.tokens if isinstance(document, MediaDocument) else document for document in encoded]
        offsets = np.cumsum([0, *map(len, documents)], dtype=np.int64)
        values = np.concatenate([np.empty(0, self._encoder.dtype), *documents])
        if values.dtype == LABELED:
            values = values.view(np.uint64)
        column = pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(values))
        columns = {"input_ids": column}
        if media:
            columns["extra"] = pa.array([document.extra for document in media], pa.large_binary())
            columns["cost"] = pa.array([document.cost for document in media], pa.float64())
        metadata = {
            "crc32": _checksum(offsets, values, columns.get("extra")),
            "sample_counts": json.dumps(counts),
        }
        schema = pa.schema({name: array.type for name, array in columns.items()}, metadata=metadata)
        unfinished = self._path(number).with_suffix(".unfinished")
        try:
            with unfinished.open("wb") as file:
                with pa.ipc.new_file(file, schema) as table:
                    table.write_batch(pa.record_batch(list(columns.values()), schema=schema))
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(self._path(number))
        except BaseException:  # also of a signal
            unfinished.unlink(missing_ok=True)
            raise

    def _encode(self, number: int, check: Callable[[], None], counts: Counter[str]) -> list[Any]:
        ranges = self._shards[number]
        problems: list[str] = []
        self._require_unchanged(ranges)
        documents: list[np.ndarray | MediaDocument] = []
        for batch in self._encoder.encode(ranges, problems, counts):
            check()
            documents += batch
        # A file that changes while it is read looks malformed; report the change instead.
        self._require_unchanged(ranges)
        if problems:
            can_skip = getattr(self._encoder, "on_bad_sample", None) == "error"
            raise _unreadable(problems, _SKIPPING if can_skip else "")
        if not documents and len(self.sizes) == 1:
            described = f"; {described_counts(counts)}" if counts else ""
            raise _unreadable([f"{no_text(list(self._stamps), bool(counts))}{described}"])
        return documents

    def _require_unchanged(self, ranges: Sequence[ByteRange]) -> None:
        for file in {part.file for part in ranges}:
            try:
                found = "it has changed" if _stamp(file) != self._stamps[file] else None
            except OSError as error:
                found = str(error.strerror)
            if found:
                raise DataError(
                    f"{file}: {found} while the run was reading it",
                    hint=(
                        "restore it and continue with train.checkpoint.resume_from: latest, or start a new run on the "
                        "changed file"
                    ),
                )


def _sample_counts(path: Path) -> Counter[str]:
    """Those of a shard, without reading its documents."""
    import pyarrow as pa

    with pa.memory_map(str(path)) as file:
        return Counter(json.loads(pa.ipc.open_file(file).schema.metadata[b"sample_counts"]))


_SKIPPING = (
    "fix the samples; or leave malformed ones out with data.on_bad_sample: skip, and long ones with "
    "data.long_samples: skip"
)


def _unreadable(problems: Sequence[str], hint: str = "") -> DataError:
    return DataError(list_problems("the data cannot be read", problems), hint=hint)


def _checksum(starts: np.ndarray, tokens: np.ndarray, extras: Any = None) -> bytes:
    value = zlib.crc32(np.ascontiguousarray(tokens).data, zlib.crc32(np.ascontiguousarray(starts).data))
    for buffer in extras.buffers()[1:] if extras is not None else ():
        value = zlib.crc32(buffer, value)
    return f"{value:08x}".encode()


_SUFFIX = ".arrow"


def open_corpus(
    files: Sequence[Path],
    encoder: Encoder,
    *,
    sample_by: str = "document",
    format: str = "auto",
    cache_dir: str | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> TokenCorpus:
    """The documents of `files`, tokenized as they are needed, or read from the cache of an earlier run.

    Args:
        encoder: records to tokens.
        sample_by, format, cache_dir: as in `DataConfig`.
        shard_bytes: text that is tokenized at a time. A longer plain text file is split into documents of this size, at
            ends of lines.

    Raises:
        DataError: a missing file, or files without the columns of the encoder.
    """
    _tokenize_with_threads()
    problems: list[str] = []
    try:
        stamps = {file: _stamp(file) for file in files}
        for file in files:
            encoder.inspect(file, format, problems)
        shards = [] if problems else split_into_shards(files, encoder.columns, shard_bytes, problems, format, sample_by)
        identity = _identity(stamps, encoder, sample_by)
    except OSError as error:
        raise _unreadable([f"{error.filename}: {error.strerror}"]) from error
    if not problems and not shards:
        problems.append(no_text(files))
    if problems:
        raise _unreadable(problems)
    key = hashlib.sha256(repr((_FORMAT, format, shard_bytes, identity)).encode())
    for file, (size, changed) in stamps.items():
        # The name of a file need not be UTF-8.
        key.update(f"{file.resolve()}\0{size}\0{changed}\n".encode(errors="surrogateescape"))
    cache = Path(cache_dir) if cache_dir else _default_cache()
    return TokenCorpus(shards, stamps, encoder, cache / f"opslot-{key.hexdigest()[:32]}", identity)


def _tokenize_with_threads() -> None:
    """Unless the user has set it, enable the tokenizer's own threads; setting it also avoids its warning at a fork."""
    if "TOKENIZERS_PARALLELISM" not in os.environ:
        os.environ["TOKENIZERS_PARALLELISM"] = "true"
        # A forked process would wait for threads that only exist in its parent.
        os.register_at_fork(after_in_child=lambda: os.environ.update(TOKENIZERS_PARALLELISM="false"))


@contextlib.contextmanager
def _locked(path: Path, number: int) -> Iterator[bool]:
    """Hold the lock of one shard; False if another process holds it. Released when the process ends, even by a kill.

    The lock of shard n is a POSIX lock on byte n of one file, so it also works across machines of a shared file system.
    A process must not take two at a time: closing the file releases both.
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


def _stamp(file: Path) -> tuple[int, int]:
    facts = file.stat()
    return facts.st_size, facts.st_mtime_ns


def _default_cache() -> Path:
    """The cache folder of Hugging Face datasets, without importing it."""
    from huggingface_hub.constants import HF_HOME

    return Path(os.environ.get("HF_DATASETS_CACHE") or Path(HF_HOME) / "datasets").expanduser()


def _identity(stamps: Mapping[Path, tuple[int, int]], encoder: Encoder, sample_by: str) -> dict[str, Any]:
    """What determines the tokens, by configuration field; independent of paths and modification times."""
    total = sum(size for size, _ in stamps.values())
    return {
        "data.train_path": f"{len(stamps):,} files, {total:,} bytes, content {_content_digest(stamps)}",
        "data.sample_by": sample_by,
        **encoder.identity(),
    }


def _content_digest(stamps: Mapping[Path, tuple[int, int]]) -> str:
    """Digest of the files' contents in order; of more than `_DIGEST_BYTES`, of evenly spaced parts of each file."""
    digest = hashlib.sha256()
    budget = _DIGEST_BYTES // max(1, len(stamps))
    for path, (size, _) in stamps.items():
        digest.update(f"{size}\n".encode())
        with path.open("rb") as file:
            if size <= max(budget, 2 * _DIGEST_PART):
                while chunk := file.read(1 << 20):
                    digest.update(chunk)
                continue
            parts = max(2, budget // _DIGEST_PART)
            for number in range(parts):
                file.seek((size - _DIGEST_PART) * number // (parts - 1))
                digest.update(file.read(_DIGEST_PART))
    return digest.hexdigest()[:16]
