"""Where records are: parts of files that can be read on their own, and the place of a record for errors."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

_SEARCHED_BYTES = 1 << 20


# The hint for a file that cannot be read.
AGAIN = "write or download it again"


@dataclass(frozen=True, slots=True)
class ByteRange:
    """A part of a file that can be read on its own.

    Attributes:
        start, stop: byte offsets, each moved forward to the start of the next document; in a table, row numbers.
            Compressed files, JSON arrays and tar files are one range.
        size: bytes of text, estimated for tables and compressed files.
        format: "text", "jsonl", "json_array", "parquet", "arrow" or "tar".
        sample_by: what a document is in plain text, as in `DataConfig`.
    """

    file: Path
    start: int
    stop: int
    size: int
    format: str
    sample_by: str = "document"


@dataclass(frozen=True, slots=True)
class Location:
    """Where a record is, for errors; the line number is counted when the location is printed.

    Attributes:
        number: of the line after byte `start`, of the item, or of the row; from 1.
    """

    file: Path
    unit: str
    number: int
    start: int = 0

    def __str__(self) -> str:
        before = _count_newlines(self.file, self.start) if self.start else 0
        return f"{self.file}, {self.unit} {before + self.number}"


@functools.lru_cache(maxsize=8)
def _count_newlines(path: Path, stop: int) -> int:
    """Newlines in the first `stop` bytes."""
    count = 0
    with path.open("rb") as file:
        while stop > 0 and (chunk := file.read(min(_SEARCHED_BYTES, stop))):
            count += chunk.count(b"\n")
            stop -= len(chunk)
    return count
