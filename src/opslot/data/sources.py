"""Text files of any supported kind as a stream of documents, with the place of every mistake."""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from opslot._base.errors import DataError

JSON_LINES = frozenset({".jsonl", ".ndjson", ".json"})
_SHOWN = 10
# Arrow's types.
_STRINGS = ("string", "large_string", "string_view")
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


def read_documents(files: Sequence[Path], text_field: str = "text", sample_by: str = "document") -> Iterator[str]:
    """Documents of `files` in order, without the empty ones.

    Raises:
        DataError: after the last document: every malformed place (file and line), and files without any text.
    """
    problems: list[str] = []
    documents = 0
    for file in files:
        for text in _reader(file)(file, text_field, sample_by, problems):
            if text and not text.isspace():
                documents += 1
                yield text
    if not problems and documents == 0:
        problems.append(f"{_names(files)}: no text in any of them, so there is nothing to train on")
    if problems:
        raise DataError(list_problems("the data cannot be read", problems))


def list_problems(title: str, problems: Sequence[str], shown: int = _SHOWN) -> str:
    """`title`, then a line a problem; a long list is cut and counted."""
    lines = [f"- {problem}" for problem in problems[:shown]]
    if len(problems) > shown:
        lines.append(f"- and {len(problems) - shown} more")
    return f"{title}:\n" + "\n".join(lines)


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


_Reader = Callable[[Path, str, str, list[str]], Iterator[str]]


def _reader(file: Path) -> _Reader:
    suffix = file.suffix.lower()
    if suffix in JSON_LINES:
        return _read_json_lines
    return _read_parquet if suffix == ".parquet" else _read_text


def _read_text(file: Path, _text_field: str, sample_by: str, problems: list[str]) -> Iterator[str]:
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        problems.append(f"{file}: not UTF-8 text (byte {error.start}); convert it, or leave it out")
        return
    if sample_by == "document":
        yield text
    else:
        yield from text.split("\n" if sample_by == "line" else "\n\n")


def _read_json_lines(file: Path, text_field: str, _sample_by: str, problems: list[str]) -> Iterator[str]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            text, problem = _text_of_line(line, text_field)
            if problem:
                problems.append(f"{file}, line {number}: {problem}")
            else:
                yield text


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


def _read_parquet(file: Path, text_field: str, _sample_by: str, problems: list[str]) -> Iterator[str]:
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
                return
            kind = table.schema_arrow.field(text_field).type
            values = kind.value_type if pa.types.is_dictionary(kind) else kind
            if str(values) not in _STRINGS:
                problems.append(f"{file}: column {text_field!r} holds {kind}, not strings")
                return
            for batch in table.iter_batches(columns=[text_field]):
                yield from (text for text in batch.column(0).to_pylist() if text)
    except (pa.ArrowInvalid, OSError, UnicodeDecodeError) as error:
        problems.append(f"{file}: not a readable parquet file: {error}")
