"""Records of WebDataset tar files: the members of one name are a sample, and a .json or .txt member its record.

`0001.json` with `0001.png` and `0001.wav` is a record to which the media are added as the columns `images`, `videos`
and `audios`, in the order of the members. A path in the record that is the name of a member stands for that member.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from opslot._base.errors import json_type
from opslot.data.locations import AGAIN, ByteRange, Location

_COLUMNS = {
    "images": ("jpg", "jpeg", "png", "webp", "bmp", "ppm", "tif", "tiff", "avif"),
    "videos": ("mp4", "m4v", "mkv", "avi", "mov", "webm", "flv", "ts", "mpg", "mpeg", "wmv", "gif"),
    "audios": ("wav", "flac", "mp3", "ogg", "opus", "m4a", "aac"),
}
_COLUMN_OF = {suffix: column for column, suffixes in _COLUMNS.items() for suffix in suffixes}


def read_tar(
    part: ByteRange, _columns: Sequence[str], problems: list[str], malformed: list[str]
) -> Iterator[tuple[Location, dict[str, Any]]]:
    """The samples of a tar file, one at a time in memory; see `records.read_records`."""
    try:
        with tarfile.open(part.file, "r|") as archive:
            number, key, members = 0, "", list[tuple[str, bytes]]()
            for member in archive:
                name = _key(member.name)
                if not member.isfile() or member.name.rpartition("/")[2].startswith("."):
                    continue
                if members and name != key:
                    number += 1
                    yield from _record(Location(part.file, "sample", number), members, malformed)
                    members = []
                stream = archive.extractfile(member)
                assert stream is not None, "a regular file"
                key = name
                members.append((member.name, stream.read()))
            if members:
                yield from _record(Location(part.file, "sample", number + 1), members, malformed)
            if reason := _not_at_the_end(part.file, archive.offset):
                problems.append(f"{part.file}: not a readable tar file ({reason}); {AGAIN}")
    except (tarfile.TarError, EOFError) as error:
        problems.append(f"{part.file}: not a readable tar file ({error}); {AGAIN}")


def _not_at_the_end(file: Path, offset: int) -> str | None:
    """Why a tar file does not end at `offset`, where tarfile found no further member; None if it does.

    tarfile takes every damaged header but the first one for the end, which is a block of zeros.
    """
    with file.open("rb") as stream:
        stream.seek(offset)
        block = stream.read(tarfile.BLOCKSIZE)
        if len(block) < tarfile.BLOCKSIZE:
            return f"cut off after {offset:,} bytes: the zeros that end an archive are missing"
        if any(block):
            return f"invalid header at byte {offset:,}"
        while rest := stream.read(1 << 20):
            if any(rest):
                return f"data after the end of the archive at byte {offset:,}"
    return None


def _key(name: str) -> str:
    """What the members of a sample have in common: the path up to the first dot of the file's name."""
    folder, slash, file = name.rpartition("/")
    return folder + slash + file.partition(".")[0]


def _record(
    where: Location, members: list[tuple[str, bytes]], malformed: list[str]
) -> Iterator[tuple[Location, dict[str, Any]]]:
    record: dict[str, Any] = {}
    media: dict[str, dict[str, Any]] = {}
    for name, data in members:
        suffix = name.rpartition(".")[2].lower()
        if suffix == "json":
            try:
                found = json.loads(data)
            except (ValueError, RecursionError) as error:
                malformed.append(f"{where}: {name} is not JSON ({error})")
                return
            if not isinstance(found, dict):
                malformed.append(f"{where}: {name} holds {json_type(found)}, not an object")
                return
            record |= found
        elif suffix == "txt":
            record.setdefault("text", data.decode(errors="replace"))
        else:
            media[name] = {"bytes": data, "path": name}
    by_name = {short: source for name, source in media.items() for short in (name, name.rpartition("/")[2])}
    used: set[str] = set()
    record = {column: _with_members(value, by_name, used) for column, value in record.items()}
    for name, source in media.items():
        column = _COLUMN_OF.get(name.rpartition(".")[2].lower())
        if column is None or name in used:
            continue
        if not isinstance(record.setdefault(column, []), list):
            malformed.append(
                f"{where}: {column} is {record[column]!r}, which is none of its files ({', '.join(media)}); "
                f"name one of them, or remove {column} from its .json"
            )
            return
        record[column].append(source)
    yield where, record


def _with_members(value: Any, by_name: dict[str, dict[str, Any]], used: set[str]) -> Any:
    """`value` with the members that it names, which are added to `used`."""
    if isinstance(value, str) and value in by_name:
        used.add(by_name[value]["path"])
        return by_name[value]
    if isinstance(value, list):
        return [_with_members(item, by_name, used) for item in value]
    if isinstance(value, dict):
        return {key: _with_members(item, by_name, used) for key, item in value.items()}
    return value
