"""Documents of text, JSON Lines and parquet files, with file and line of every error."""

from __future__ import annotations

import glob
import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from opslot._base.logging import get_logger

logger = get_logger(__name__)

_FORMATS = {
    **dict.fromkeys((".jsonl", ".ndjson", ".jsonlines", ".jl", ".json"), "jsonl"),
    ".parquet": "parquet",
    **dict.fromkeys((".txt", ".md"), "text"),
}
_COMPRESSED = {".gz", ".zst", ".bz2", ".xz", ".zip"}
# Names of Arrow's string types.
_STRINGS = ("string", "large_string", "string_view")
_NEWLINE = re.compile(rb"\n")
_BLANK_LINE = re.compile(rb"\r?\n\r?\n")
_LONGEST_SEPARATOR = 4
_SEARCHED_BYTES = 1 << 20
_PARTS_OF_ROW_GROUP = 32
_BATCH_ROWS = 1024
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def find_files(paths: str | Sequence[str], field: str, problems: list[str], format: str = "auto") -> list[Path]:
    """Existing files for `paths` (files or globs), each once, in order; errors are appended to `problems`.

    A file that is named itself must not be empty; one that a glob finds may be.
    """
    found: list[Path] = []
    named = [paths] if isinstance(paths, str) else list(paths)
    if not any(named):
        problems.append(f"{field} is empty; set it to a text, jsonl or parquet file, or a glob such as corpus/**/*.txt")
        return []
    for name in named:
        path = Path(name).expanduser()
        if path.is_dir():
            problems.append(
                f"{field}: {name} is a folder; select its files with a glob such as {name.rstrip('/')}/**/*.txt"
            )
        elif path.exists():
            problem = _unreadable(path)
            if problem:
                problems.append(f"{field}: {problem}")
            found.append(path)
        elif glob.has_magic(name):
            matches = [Path(match) for match in sorted(glob.glob(str(path), recursive=True)) if os.path.isfile(match)]
            if not matches:
                problems.append(f"{field}: no file matches {name}; searched from {Path.cwd()}")
            problems += [f"{field}: {problem}" for match in matches if (problem := _forbidden(match))]
            found += matches
        else:
            problems.append(f"{field}: no such file: {name}; {_missing_hint(name)}")
    files = _without_links(dict.fromkeys(found))
    problems += [f"{field}: {problem}" for file in files if (problem := _unknown_format(file, format))]
    return files


def _missing_hint(name: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w-]*", name):
        return (
            f"for a dataset on the Hugging Face hub, run `hf download {name} --repo-type dataset --local-dir data` "
            "and select its files, such as data/**/*.parquet"
        )
    return f"relative paths start at {Path.cwd()}"


def _without_links(files: Iterable[Path]) -> list[Path]:
    """`files` without those that are links to another of them."""
    first: dict[tuple[int, int], Path] = {}
    for file in files:
        facts = file.stat()
        same = first.setdefault((facts.st_dev, facts.st_ino), file)
        if same is not file:
            logger.warning("%s and %s are the same file; it is read once", same, file)
    return list(first.values())


def _unknown_format(file: Path, format: str) -> str | None:
    suffix = file.suffix.lower()
    if format != "auto" or suffix in _FORMATS:
        return None
    found = f"the unknown extension {suffix!r}" if suffix else "no extension"
    hint = "decompress it" if suffix in _COMPRESSED else "set data.format to text, jsonl or parquet, or convert it"
    return f"{file} has {found}; known are {', '.join(_FORMATS)}; {hint}"


@dataclass(frozen=True, slots=True)
class ByteRange:
    """A part of a file that can be read on its own.

    Attributes:
        start, stop: byte offsets, each moved forward to the start of the next document; in a parquet file, row numbers.
        size: bytes of text, estimated for parquet files.
        format: "text", "jsonl" or "parquet".
    """

    file: Path
    start: int
    stop: int
    size: int
    format: str


def split_into_shards(
    files: Sequence[Path], text_field: str, max_bytes: int, problems: list[str], format: str = "auto"
) -> list[tuple[ByteRange, ...]]:
    """Split `files`, in order, into shards of about `max_bytes` of text; errors are appended to `problems`.

    Shards depend on the sizes of the files alone (and on the row groups of parquet files), so they are known before any
    text is read.
    """
    shards: list[list[ByteRange]] = [[]]
    size = 0
    for file in files:
        for part in _byte_ranges(file, text_field, max_bytes, problems, format):
            if shards[-1] and size + part.size > max_bytes:
                shards.append([])
                size = 0
            shards[-1].append(part)
            size += part.size
    return [tuple(shard) for shard in shards if shard]


def read_ranges(ranges: Sequence[ByteRange], text_field: str, sample_by: str, problems: list[str]) -> Iterator[str]:
    """Documents of `ranges` in order, without empty ones; errors are appended to `problems`."""
    for part in ranges:
        try:
            for text in _READERS[part.format](part, text_field, sample_by, problems):
                if text and not text.isspace():
                    yield text
        except OSError as error:
            problems.append(f"{part.file}: {error.strerror or error}")


def no_text(files: Sequence[Path]) -> str:
    """The error for files that hold only whitespace."""
    return f"{_names(files)}: no text in any of them, so there is nothing to train on"


def _unreadable(path: Path) -> str | None:
    if not path.is_file():
        return f"{path} is not a regular file"
    if path.stat().st_size == 0:
        return f"{path} is empty"
    return _forbidden(path)


def _forbidden(path: Path) -> str | None:
    return None if os.access(path, os.R_OK) else f"{path} is not readable; check its permissions"


def _names(files: Sequence[Path]) -> str:
    return str(files[0]) if len(files) == 1 else f"{files[0]} and {len(files) - 1} more files"


def _byte_ranges(file: Path, text_field: str, max_bytes: int, problems: list[str], format: str) -> Iterator[ByteRange]:
    kind = _FORMATS.get(file.suffix.lower(), "text") if format == "auto" else format
    if kind == "parquet":
        yield from _parquet_ranges(file, text_field, max_bytes, problems)
        return
    size = file.stat().st_size
    for start in range(0, size, max_bytes):
        stop = min(start + max_bytes, size)
        yield ByteRange(file, start, stop, stop - start, kind)


def _bounds(file: BinaryIO, part: ByteRange, separator: re.Pattern[bytes]) -> tuple[int, int]:
    """Start and end of the documents that begin inside `part`."""
    size = os.fstat(file.fileno()).st_size
    return _next_start(file, part.start, size, separator), _next_start(file, part.stop, size, separator)


def _next_start(file: BinaryIO, offset: int, size: int, separator: re.Pattern[bytes]) -> int:
    """The first offset from `offset` on that follows a separator; the ends of the file count as separators."""
    if offset == 0 or offset >= size:
        return min(offset, size)
    begin = max(0, offset - _LONGEST_SEPARATOR)
    file.seek(begin)
    buffer = b""
    while chunk := file.read(_SEARCHED_BYTES):
        buffer += chunk
        found = separator.search(buffer)
        while found and begin + found.end() < offset:
            found = separator.search(buffer, found.start() + 1)
        if found:
            return begin + found.end()
        begin += max(0, len(buffer) - _LONGEST_SEPARATOR)
        buffer = buffer[-_LONGEST_SEPARATOR:]
    return size


def _read_text(part: ByteRange, _text_field: str, sample_by: str, problems: list[str]) -> Iterator[str]:
    with part.file.open("rb") as file:
        start, stop = _bounds(file, part, _BLANK_LINE if sample_by == "paragraph" else _NEWLINE)
        file.seek(start)
        data = file.read(stop - start)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        problems.append(f"{part.file}: not UTF-8 text (byte {start + error.start}); convert it, or remove it")
        return
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if sample_by == "document":
        yield text
    else:
        yield from text.split("\n" if sample_by == "line" else "\n\n")


def _read_json_lines(part: ByteRange, text_field: str, _sample_by: str, problems: list[str]) -> Iterator[str]:
    with part.file.open("rb") as lines:
        start, stop = _bounds(lines, part, _NEWLINE)
        lines.seek(start)
        offset, lines_before = start, None
        for number, line in enumerate(lines, 1):
            if offset >= stop:
                break
            offset += len(line)
            if not line.strip():
                continue
            text, problem = _text_of_line(line, text_field)
            if problem:
                if lines_before is None:
                    lines_before = _count_newlines(part.file, start)
                problems.append(f"{part.file}, line {lines_before + number}: {problem}")
            else:
                yield text


def _count_newlines(path: Path, stop: int) -> int:
    """Newlines in the first `stop` bytes."""
    count = 0
    with path.open("rb") as file:
        while stop > 0 and (chunk := file.read(min(_SEARCHED_BYTES, stop))):
            count += chunk.count(b"\n")
            stop -= len(chunk)
    return count


def _text_of_line(line: bytes, text_field: str) -> tuple[str, str | None]:
    try:
        record = json.loads(line.strip())
    # Also for numbers with more digits, and brackets nested more deeply, than Python parses.
    except (ValueError, RecursionError) as error:
        return "", f"not JSON ({error}); the file must hold one object a line"
    if not isinstance(record, dict):
        return "", f"holds a {type(record).__name__}; the file must hold one object a line"
    if text_field not in record:
        fields = ", ".join(map(str, record)) or "none"
        return "", f"no field {text_field!r}; it has {fields}. Set data.text_field to the field that holds the text"
    text = record[text_field]
    if not isinstance(text, str):
        return "", f"field {text_field!r} holds a {type(text).__name__}, not a string"
    lone = _LONE_SURROGATE.search(text)
    if lone:
        return "", f"field {text_field!r} holds \\u{ord(lone[0]):04x}, half of a surrogate pair, which is not text"
    return text, None


def _parquet_ranges(file: Path, text_field: str, max_bytes: int, problems: list[str]) -> list[ByteRange]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file) as table:
            columns = table.schema_arrow.names
            if text_field not in columns:
                problems.append(
                    f"{file}: no column {text_field!r}; it has {', '.join(columns)}. "
                    "Set data.text_field to the column that holds the text"
                )
                return []
            kind = table.schema_arrow.field(text_field).type
            values = kind.value_type if pa.types.is_dictionary(kind) else kind
            if str(values) not in _STRINGS:
                problems.append(f"{file}: column {text_field!r} holds {kind}, not strings")
                return []
            return _row_ranges(file, table.metadata, text_field, max_bytes)
    except (pa.ArrowInvalid, OSError) as error:
        problems.append(f"{file}: not a readable parquet file: {error}")
        return []


def _row_ranges(file: Path, metadata: Any, text_field: str, max_bytes: int) -> list[ByteRange]:
    ranges = []
    first = 0
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        columns = (group.column(i) for i in range(group.num_columns))
        size = sum(c.total_uncompressed_size for c in columns if c.path_in_schema == text_field)
        # A row group is decoded from its start, so a huge one is split into fewer, larger parts.
        parts = min(_PARTS_OF_ROW_GROUP, max(1, -(-size // max_bytes)), group.num_rows)
        offsets = [first + group.num_rows * i // parts for i in range(parts + 1)] if parts else []
        ranges += [
            ByteRange(file, start, stop, max(1, size // parts), "parquet")
            for start, stop in itertools.pairwise(offsets)
        ]
        first += group.num_rows
    return ranges


def _read_parquet(part: ByteRange, text_field: str, _sample_by: str, problems: list[str]) -> Iterator[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(part.file) as table:
            number, first = 0, 0
            while first + (rows := table.metadata.row_group(number).num_rows) <= part.start:
                number, first = number + 1, first + rows
            for batch in table.iter_batches(row_groups=[number], columns=[text_field], batch_size=_BATCH_ROWS):
                if first >= part.stop:
                    break
                inside = batch.column(0)[max(0, part.start - first) : part.stop - first]
                yield from (text for text in inside.to_pylist() if text)
                first += len(batch)
    except (pa.ArrowInvalid, OSError, UnicodeDecodeError) as error:
        problems.append(f"{part.file}: not a readable parquet file: {error}")


_READERS: dict[str, Callable[[ByteRange, str, str, list[str]], Iterator[str]]] = {
    "text": _read_text,
    "jsonl": _read_json_lines,
    "parquet": _read_parquet,
}
