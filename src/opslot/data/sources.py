"""Text files of any supported kind as a stream of documents, with the place of every mistake."""

from __future__ import annotations

import glob
import itertools
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from opslot._base.errors import DataError, list_problems

JSON_LINES = frozenset({".jsonl", ".ndjson", ".json"})
# Arrow's types.
_STRINGS = ("string", "large_string", "string_view")
_NEWLINE = re.compile(rb"\n")
_BLANK_LINE = re.compile(rb"\r?\n\r?\n")
_LONGEST_SEPARATOR = 4
_SEARCHED_BYTES = 1 << 20
_PIECE_BYTES = 4 << 20
_PARTS_OF_ROW_GROUP = 32
_BATCH_ROWS = 1024
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def find_files(paths: str | Sequence[str], field: str, problems: list[str]) -> list[Path]:
    """Files that `paths` (files or globs) name, each once, in order; what is wrong goes to `problems`.

    A file that is named by itself must hold something; one that a glob finds may be empty.
    """
    found: dict[Path, None] = {}
    named = [paths] if isinstance(paths, str) else list(paths)
    if not any(named):
        problems.append(f"{field} is empty; name a text, jsonl or parquet file, or a glob such as corpus/**/*.txt")
        return []
    for name in named:
        path = Path(name).expanduser()
        if path.is_dir():
            problems.append(
                f"{field}: {name} is a folder; name its files by a glob such as {name.rstrip('/')}/**/*.txt"
            )
        elif path.exists():
            problem = _unreadable(path)
            if problem:
                problems.append(f"{field}: {problem}")
            found[path] = None
        elif glob.has_magic(name):
            matches = [Path(match) for match in sorted(glob.glob(str(path), recursive=True)) if os.path.isfile(match)]
            if not matches:
                problems.append(f"{field}: no file matches {name}; searched from {Path.cwd()}")
            problems += [f"{field}: {problem}" for match in matches if (problem := _forbidden(match))]
            found.update(dict.fromkeys(matches))
        else:
            problems.append(f"{field}: no such file: {name}; relative paths start at {Path.cwd()}")
    return list(found)


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a file that is read by itself.

    Attributes:
        start, stop: its bytes, each moved on to where the next document begins; of a parquet file, its rows.
        size: bytes of text in it, of a parquet file about.
    """

    file: Path
    start: int
    stop: int
    size: int


def split_files(files: Sequence[Path], text_field: str, max_bytes: int, problems: list[str]) -> list[tuple[Span, ...]]:
    """Divide `files`, in order, into blocks of about `max_bytes` of text; what is wrong goes to `problems`.

    Blocks depend on the sizes of the files alone (of parquet files, on those of their row groups), so they are known
    before any text is read.
    """
    blocks: list[list[Span]] = [[]]
    size = 0
    for file in files:
        for span in _spans(file, text_field, max_bytes, problems):
            if blocks[-1] and size + span.size > max_bytes:
                blocks.append([])
                size = 0
            blocks[-1].append(span)
            size += span.size
    return [tuple(block) for block in blocks if block]


def read_documents(files: Sequence[Path], text_field: str = "text", sample_by: str = "document") -> Iterator[str]:
    """Documents of `files` in order, without the empty ones.

    Raises:
        DataError: after the last document: every malformed place (file and line), and files without any text.
    """
    problems: list[str] = []
    documents = 0
    for block in split_files(files, text_field, _PIECE_BYTES, problems):
        for text in read_spans(block, text_field, sample_by, problems):
            documents += 1
            yield text
    if not problems and documents == 0:
        problems.append(no_text(files))
    if problems:
        raise DataError(list_problems("the data cannot be read", problems))


def read_spans(spans: Sequence[Span], text_field: str, sample_by: str, problems: list[str]) -> Iterator[str]:
    """Documents of `spans` in order, without the empty ones; every malformed place goes to `problems`."""
    for span in spans:
        try:
            for text in _reader(span.file)(span, text_field, sample_by, problems):
                if text and not text.isspace():
                    yield text
        except OSError as error:
            problems.append(f"{span.file}: {error.strerror or error}")


def no_text(files: Sequence[Path]) -> str:
    """The problem of files that hold nothing but blanks."""
    return f"{_names(files)}: no text in any of them, so there is nothing to train on"


def _unreadable(path: Path) -> str | None:
    if not path.is_file():
        return f"{path} is not a regular file"
    if path.stat().st_size == 0:
        return f"{path} is empty"
    return _forbidden(path)


def _forbidden(path: Path) -> str | None:
    return None if os.access(path, os.R_OK) else f"{path} may not be read; check its permissions"


def _names(files: Sequence[Path]) -> str:
    return str(files[0]) if len(files) == 1 else f"{files[0]} and {len(files) - 1} more files"


def _spans(file: Path, text_field: str, max_bytes: int, problems: list[str]) -> Iterator[Span]:
    if file.suffix.lower() == ".parquet":
        yield from _parquet_spans(file, text_field, max_bytes, problems)
        return
    size = file.stat().st_size
    for start in range(0, size, max_bytes):
        stop = min(start + max_bytes, size)
        yield Span(file, start, stop, stop - start)


_Reader = Callable[[Span, str, str, list[str]], Iterator[str]]


def _reader(file: Path) -> _Reader:
    suffix = file.suffix.lower()
    if suffix in JSON_LINES:
        return _read_json_lines
    return _read_parquet if suffix == ".parquet" else _read_text


def _bounds(file: BinaryIO, span: Span, separator: re.Pattern[bytes]) -> tuple[int, int]:
    """Where the documents of `span` begin and end: it has those that begin inside it."""
    size = os.fstat(file.fileno()).st_size
    return _next_start(file, span.start, size, separator), _next_start(file, span.stop, size, separator)


def _next_start(file: BinaryIO, place: int, size: int, separator: re.Pattern[bytes]) -> int:
    """The first place from `place` on that follows a separator; the ends of the file count as separators."""
    if place == 0 or place >= size:
        return min(place, size)
    begin = max(0, place - _LONGEST_SEPARATOR)
    file.seek(begin)
    window = b""
    while piece := file.read(_SEARCHED_BYTES):
        window += piece
        found = separator.search(window)
        while found and begin + found.end() < place:
            found = separator.search(window, found.start() + 1)
        if found:
            return begin + found.end()
        begin += max(0, len(window) - _LONGEST_SEPARATOR)
        window = window[-_LONGEST_SEPARATOR:]
    return size


def _read_text(span: Span, _text_field: str, sample_by: str, problems: list[str]) -> Iterator[str]:
    with span.file.open("rb") as file:
        start, stop = _bounds(file, span, _BLANK_LINE if sample_by == "paragraph" else _NEWLINE)
        file.seek(start)
        data = file.read(stop - start)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        problems.append(f"{span.file}: not UTF-8 text (byte {start + error.start}); convert it, or leave it out")
        return
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if sample_by == "document":
        yield text
    else:
        yield from text.split("\n" if sample_by == "line" else "\n\n")


def _read_json_lines(span: Span, text_field: str, _sample_by: str, problems: list[str]) -> Iterator[str]:
    with span.file.open("rb") as lines:
        start, stop = _bounds(lines, span, _NEWLINE)
        lines.seek(start)
        place, lines_before = start, None
        for number, line in enumerate(lines, 1):
            if place >= stop:
                break
            place += len(line)
            if not line.strip():
                continue
            text, problem = _text_of_line(line, text_field)
            if problem:
                if lines_before is None:
                    lines_before = _count_newlines(span.file, start)
                problems.append(f"{span.file}, line {lines_before + number}: {problem}")
            else:
                yield text


def _count_newlines(path: Path, stop: int) -> int:
    """Newlines in the first `stop` bytes."""
    count = 0
    with path.open("rb") as file:
        while stop > 0 and (piece := file.read(min(_SEARCHED_BYTES, stop))):
            count += piece.count(b"\n")
            stop -= len(piece)
    return count


def _text_of_line(line: bytes, text_field: str) -> tuple[str, str | None]:
    try:
        record = json.loads(line.strip())
    # Also for numbers of more digits, and brackets of more levels, than Python reads.
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
        return "", f"field {text_field!r} holds \\u{ord(lone[0]):04x}, half of a character, which is no text"
    return text, None


def _parquet_spans(file: Path, text_field: str, max_bytes: int, problems: list[str]) -> list[Span]:
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
            return _row_spans(file, table.metadata, text_field, max_bytes)
    except (pa.ArrowInvalid, OSError) as error:
        problems.append(f"{file}: not a readable parquet file: {error}")
        return []


def _row_spans(file: Path, metadata: Any, text_field: str, max_bytes: int) -> list[Span]:
    spans = []
    first = 0
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        columns = (group.column(i) for i in range(group.num_columns))
        size = sum(c.total_uncompressed_size for c in columns if c.path_in_schema == text_field)
        # A row group is decoded from its start, so the parts of a huge one are fewer and larger.
        parts = min(_PARTS_OF_ROW_GROUP, max(1, -(-size // max_bytes)), group.num_rows)
        borders = [first + group.num_rows * i // parts for i in range(parts + 1)] if parts else []
        spans += [Span(file, start, stop, max(1, size // parts)) for start, stop in itertools.pairwise(borders)]
        first += group.num_rows
    return spans


def _read_parquet(span: Span, text_field: str, _sample_by: str, problems: list[str]) -> Iterator[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(span.file) as table:
            number, first = 0, 0
            while first + (rows := table.metadata.row_group(number).num_rows) <= span.start:
                number, first = number + 1, first + rows
            for batch in table.iter_batches(row_groups=[number], columns=[text_field], batch_size=_BATCH_ROWS):
                if first >= span.stop:
                    break
                inside = batch.column(0)[max(0, span.start - first) : span.stop - first]
                yield from (text for text in inside.to_pylist() if text)
                first += len(batch)
    except (pa.ArrowInvalid, OSError, UnicodeDecodeError) as error:
        problems.append(f"{span.file}: not a readable parquet file: {error}")
