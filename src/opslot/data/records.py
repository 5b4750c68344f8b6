"""Records of text, JSON Lines, JSON, parquet and Arrow files, with file and line of every error."""

from __future__ import annotations

import gzip
import io
import itertools
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from opslot._base.errors import json_type
from opslot.data.chat_columns import missing_text
from opslot.data.locations import AGAIN, ByteRange, Location
from opslot.data.sources import COMPRESSIONS, format_of
from opslot.data.tar_files import read_tar

_NEWLINE = re.compile(rb"\n")
_BLANK_LINE = re.compile(rb"\r?\n\r?\n")
_LONGEST_SEPARATOR = 4
_SEARCHED_BYTES = 1 << 20
_PARTS_OF_ROW_GROUP = 32
_BATCH_ROWS = 1024
# Text is about this many times larger than its compressed file.
_COMPRESSION_RATIO = 4
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")

Columns = Mapping[Path, Sequence[str]]


@dataclass(frozen=True)
class FileColumns:
    """What a file's records consist of.

    Attributes:
        names: columns of a table, or fields of the first JSON record.
        schema: the Arrow schema of a table; None for JSON.
        first: the first JSON record; None for a table.
    """

    names: list[str]
    schema: Any = None
    first: dict[str, Any] | None = None

    def holds(self, name: str, kind: type) -> bool:
        """Whether the values of column or field `name` are of `kind`: bool, list or str."""
        if self.schema is None:
            return isinstance((self.first or {}).get(name), kind)
        arrow = "string" if kind is str else kind.__name__
        return arrow in str(self.schema.field(name).type)[:12]


def split_into_shards(
    files: Sequence[Path],
    columns: Columns,
    max_bytes: int,
    problems: list[str],
    format: str = "auto",
    sample_by: str = "document",
) -> list[tuple[ByteRange, ...]]:
    """Split `files`, in order, into shards of about `max_bytes` of text; errors are appended to `problems`.

    Shards depend on the sizes of the files alone (and on the row groups of tables), so they are known before any
    text is read.

    Args:
        columns: the columns that are read of each table.
        format, sample_by: as in `DataConfig`.
    """
    shards: list[list[ByteRange]] = [[]]
    size = 0
    for file in files:
        for part in _byte_ranges(file, columns.get(file, ()), max_bytes, problems, format, sample_by):
            if shards[-1] and size + part.size > max_bytes:
                shards.append([])
                size = 0
            shards[-1].append(part)
            size += part.size
    return [tuple(shard) for shard in shards if shard]


def read_ranges(ranges: Sequence[ByteRange], text_field: str, problems: list[str]) -> Iterator[str]:
    """Texts of `ranges` in order, without blank ones; errors are appended to `problems`."""
    columns = {part.file: [text_field] for part in ranges}
    for where, record in read_records(ranges, columns, problems):
        text, problem = text_of(record, text_field)
        if problem:
            problems.append(f"{where}: {problem}")
        elif text and not text.isspace():
            yield text


def read_records(
    ranges: Sequence[ByteRange], columns: Columns, problems: list[str], malformed: list[str] | None = None
) -> Iterator[tuple[Location, dict[str, Any]]]:
    """Records of `ranges` in order, without those whose columns are all null; errors are appended to `problems`.

    A document of a plain text file is a record of one field, the first of `columns`.

    Args:
        malformed: receives the errors of single records, such as lines that are not JSON; default `problems`.
    """
    malformed = problems if malformed is None else malformed
    for part in ranges:
        try:
            yield from _READERS[part.format](part, columns.get(part.file, ()), problems, malformed)
        except _DAMAGED as error:
            reason = getattr(error, "strerror", None) or str(error)
            if part.file.suffix.lower() in COMPRESSIONS:
                reason = f"cannot be decompressed ({error}); {AGAIN}"
            problems.append(f"{part.file}: {reason}")


def columns_in(file: Path, format: str, problems: list[str]) -> FileColumns | None:
    """Columns of a table, or of the first record of a JSON file; None without one, with the error in `problems`."""
    kind = _kind(file, format)
    if kind in _TABLES:
        schema = _reading_table(file, kind, problems, lambda: _schema(file, kind))
        return None if schema is None else FileColumns(schema.names, schema)
    if kind == "text":
        return FileColumns([])
    found: list[str] = []
    part = ByteRange(file, 0, file.stat().st_size, 1, kind)
    for _, record in read_records([part], {}, found):
        return FileColumns([str(name) for name in record], first=record)
    problems += found[:1]
    return None


def text_of(record: Mapping[str, Any], text_field: str) -> tuple[str, str | None]:
    """The text of a record, and what is wrong with it."""
    if text_field not in record:
        return "", missing_text(text_field, record, "field")
    text = record[text_field]
    if not isinstance(text, str):
        return "", f"field {text_field!r} holds {json_type(text)}, not a string"
    lone = lone_surrogate(text)
    return ("", f"field {text_field!r} holds {lone}") if lone else (text, None)


def lone_surrogate(text: str) -> str | None:
    """A description of the first half surrogate pair in `text`, which no tokenizer takes."""
    lone = _LONE_SURROGATE.search(text)
    return f"\\u{ord(lone[0]):04x}, half of a surrogate pair, which is not text" if lone else None


def _kind(file: Path, format: str) -> str:
    kind = format_of(file, format) or "text"
    if kind == "jsonl" and ".json" in [suffix.lower() for suffix in file.suffixes[-2:]]:
        with _open(file) as stream:
            start = b" "
            while start and start.isspace():
                start = stream.read(1)
        return "json_array" if start == b"[" else kind
    return kind


def _open(file: Path) -> Any:
    """A binary stream of a file's content, decompressed."""
    compression = COMPRESSIONS.get(file.suffix.lower())
    if compression == "gzip":
        return gzip.open(file)
    if compression == "zstd":
        import pyarrow as pa

        return io.BufferedReader(pa.input_stream(str(file), compression="zstd"))
    return file.open("rb")


def _byte_ranges(
    file: Path, columns: Sequence[str], max_bytes: int, problems: list[str], format: str, sample_by: str
) -> Iterator[ByteRange]:
    size = file.stat().st_size
    try:
        kind = _kind(file, format)
    except _DAMAGED as error:
        problems.append(f"{file}: cannot be decompressed ({error}); {AGAIN}")
        return
    if kind in _TABLES:
        ranges = _row_ranges if kind == "parquet" else _batch_ranges
        yield from _reading_table(file, kind, problems, lambda: ranges(file, columns, max_bytes)) or ()
    elif file.suffix.lower() in COMPRESSIONS:
        yield ByteRange(file, 0, size, _COMPRESSION_RATIO * size, kind)
    elif kind in ("json_array", "tar"):
        yield ByteRange(file, 0, size, size, kind)
    else:
        for start in range(0, size, max_bytes):
            stop = min(start + max_bytes, size)
            yield ByteRange(file, start, stop, stop - start, kind, sample_by)


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


def _read_text(
    part: ByteRange, columns: Sequence[str], problems: list[str], _malformed: list[str]
) -> Iterator[tuple[Location, dict[str, Any]]]:
    with part.file.open("rb") as file:
        start, stop = _bounds(file, part, _BLANK_LINE if part.sample_by == "paragraph" else _NEWLINE)
        file.seek(start)
        data = file.read(stop - start)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        problems.append(f"{part.file}: not UTF-8 text (byte {start + error.start}); convert it, or remove it")
        return
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    texts = [text] if part.sample_by == "document" else text.split("\n" if part.sample_by == "line" else "\n\n")
    field = columns[0] if columns else "text"
    for number, document in enumerate(texts, 1):
        yield Location(part.file, "document", number), {field: document}


def _read_json_lines(
    part: ByteRange, _columns: Sequence[str], _problems: list[str], malformed: list[str]
) -> Iterator[tuple[Location, dict[str, Any]]]:
    whole = part.file.suffix.lower() in COMPRESSIONS
    with _open(part.file) as lines:
        start, stop = (0, None) if whole else _bounds(lines, part, _NEWLINE)
        if not whole:
            lines.seek(start)
        offset = start
        for number, line in enumerate(lines, 1):
            if stop is not None and offset >= stop:
                break
            offset += len(line)
            if not line.strip():
                continue
            where = Location(part.file, "line", number, start)
            record, problem = _record_of_line(line)
            if problem:
                malformed.append(f"{where}: {problem}")
            else:
                yield where, record


def _read_json_array(
    part: ByteRange, _columns: Sequence[str], problems: list[str], malformed: list[str]
) -> Iterator[tuple[Location, dict[str, Any]]]:
    """Items of an array, one at a time, without reading the whole file into memory."""
    try:
        with io.TextIOWrapper(_open(part.file), encoding="utf-8") as stream:
            buffer = stream.read(_SEARCHED_BYTES).lstrip()[1:]
            for number in itertools.count(1):
                buffer = buffer.lstrip().removeprefix(",").lstrip()
                while not buffer and (more := stream.read(_SEARCHED_BYTES)):
                    buffer = more.lstrip().removeprefix(",").lstrip()
                if buffer.startswith("]"):
                    return
                item, buffer = _first_item(buffer, stream)
                where = Location(part.file, "item", number)
                if isinstance(item, dict):
                    yield where, item
                else:
                    malformed.append(f"{where}: holds {json_type(item)}; the array must hold objects")
    except (ValueError, RecursionError) as error:
        problems.append(f"{part.file}: not a JSON array ({error}); {AGAIN}")


def _first_item(text: str, stream: TextIO) -> tuple[Any, str]:
    """The JSON value at the start of `text` and what follows of the text; the value may end in `stream`.

    Raises:
        ValueError: the text of the stream does not complete it.
    """
    while True:
        try:
            item, end = json.JSONDecoder().raw_decode(text)
            return item, text[end:]
        except ValueError:
            more = stream.read(max(_SEARCHED_BYTES, len(text)))
            if not more:
                raise
            text += more


def _record_of_line(line: bytes) -> tuple[dict[str, Any], str | None]:
    try:
        # json.loads takes bytes with a zero for UTF-16 or UTF-32.
        record = json.loads(line.strip().decode("utf-8-sig", "surrogatepass"))
    except UnicodeDecodeError as error:
        return {}, f"not UTF-8 ({error.reason} at byte {error.start}); save the file in UTF-8"
    # Also for numbers with more digits, and brackets nested more deeply, than Python parses.
    except (ValueError, RecursionError) as error:
        return {}, f"not JSON ({error}); the file must hold one object a line"
    if not isinstance(record, dict):
        return {}, f"holds {json_type(record)}; the file must hold one object a line"
    return record, None


def _reading_table(file: Path, kind: str, problems: list[str], read: Callable[[], Any]) -> Any:
    """The result of `read`; None if the file is damaged, with the error in `problems`."""
    import pyarrow as pa

    try:
        return read()
    except (pa.ArrowException, OSError) as error:
        problems.append(f"{file}: not a readable {kind} file: {error}; {AGAIN}")
        return None


def _schema(file: Path, kind: str) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if kind == "parquet":
        with pq.ParquetFile(file) as table:
            schema = table.schema_arrow
    else:
        schema = _arrow_reader(file)[0]
    if repeated := {name for name in schema.names if schema.names.count(name) > 1}:
        raise pa.ArrowInvalid(f"it has several columns named {min(repeated)!r}")
    return schema


def _arrow_reader(file: Path) -> tuple[Any, Iterator[Any]]:
    """Schema and record batches of an Arrow file, of the stream format (as `datasets` writes) or the file format."""
    import pyarrow as pa

    source = pa.memory_map(str(file))
    try:
        stream = pa.ipc.open_stream(source)
    except pa.ArrowInvalid:
        table = pa.ipc.open_file(source)
        return table.schema, (table.get_batch(number) for number in range(table.num_record_batches))
    return stream.schema, iter(stream)


def _row_ranges(file: Path, columns: Sequence[str], max_bytes: int) -> list[ByteRange]:
    import pyarrow.parquet as pq

    ranges = []
    first = 0
    with pq.ParquetFile(file) as table:
        for number in range(table.metadata.num_row_groups):
            group = table.metadata.row_group(number)
            chunks = (group.column(i) for i in range(group.num_columns))
            size = sum(c.total_uncompressed_size for c in chunks if c.path_in_schema.split(".")[0] in columns)
            # A row group is decoded from its start, so a huge one is split into fewer, larger parts.
            parts = min(_PARTS_OF_ROW_GROUP, max(1, -(-size // max_bytes)), group.num_rows)
            offsets = [first + group.num_rows * i // parts for i in range(parts + 1)] if parts else []
            ranges += [
                ByteRange(file, start, stop, max(1, size // parts), "parquet")
                for start, stop in itertools.pairwise(offsets)
            ]
            first += group.num_rows
    return ranges


def _batch_ranges(file: Path, columns: Sequence[str], max_bytes: int) -> list[ByteRange]:
    ranges: list[ByteRange] = []
    first = start = size = 0
    for batch in _arrow_reader(file)[1]:
        size += batch.select(list(columns)).nbytes
        first += len(batch)
        if size >= max_bytes:
            ranges.append(ByteRange(file, start, first, size, "arrow"))
            start, size = first, 0
    if first > start:
        ranges.append(ByteRange(file, start, first, max(1, size), "arrow"))
    return ranges


def _parquet_batches(part: ByteRange, columns: Sequence[str]) -> Iterator[tuple[int, Any]]:
    """Number of the first row, and the rows, of each batch around the part."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(part.file) as table:
        number, first = 0, 0
        while first + (rows := table.metadata.row_group(number).num_rows) <= part.start:
            number, first = number + 1, first + rows
        for batch in table.iter_batches(row_groups=[number], columns=list(columns), batch_size=_BATCH_ROWS):
            yield first, batch
            first += len(batch)


def _arrow_batches(part: ByteRange, columns: Sequence[str]) -> Iterator[tuple[int, Any]]:
    first = 0
    for batch in _arrow_reader(part.file)[1]:
        if first + len(batch) > part.start:
            yield first, batch.select(list(columns))
        first += len(batch)


def _read_table(
    part: ByteRange, columns: Sequence[str], problems: list[str], _malformed: list[str]
) -> Iterator[tuple[Location, dict[str, Any]]]:
    import pyarrow as pa

    batches = _parquet_batches if part.format == "parquet" else _arrow_batches
    try:
        for first, batch in batches(part, columns):
            if first >= part.stop:
                break
            skipped = max(0, part.start - first)
            for number, row in enumerate(batch[skipped : part.stop - first].to_pylist(), first + skipped + 1):
                record = {name: value for name, value in row.items() if value is not None}
                if record:
                    yield Location(part.file, "row", number), record
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        problems.append(f"{part.file}: not a readable {part.format} file: {error}; {AGAIN}")


_TABLES = ("parquet", "arrow")
# What decompressing a damaged file raises.
_DAMAGED = (EOFError, OSError, zlib.error)
_READERS: dict[str, Callable[..., Iterator[tuple[Location, dict[str, Any]]]]] = {
    "text": _read_text,
    "jsonl": _read_json_lines,
    "json_array": _read_json_array,
    "parquet": _read_table,
    "arrow": _read_table,
    "tar": read_tar,
}
