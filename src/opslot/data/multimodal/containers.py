"""Whether a video or audio file has all the bytes that its header counts.

Decoders return the frames before the end of a file that is half downloaded, without an error.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator

_EBML, _SEGMENT = b"\x1a\x45\xdf\xa3", b"\x18\x53\x80\x67"
# Boxes of an MP4 file with its index and its frames. Other boxes may be bytes that something appended.
_BOXES = (b"moov", b"moof", b"mdat")
# Sizes in the header of an AVI file that was written to a stream.
_STREAMED = (0, 2**31 - 1, 2**32 - 1)
# Types of the tags of an FLV file, and the size of what is before their data.
_AUDIO, _VIDEO, _SCRIPT = 8, 9, 18
_TAG_HEADER = 11
# A number in the metadata of an FLV file. Encoders differ in the case of its name.
_FILE_SIZE = re.compile(rb"\0\x08filesize\0(.{8})", re.IGNORECASE | re.DOTALL)


def missing_bytes(data: bytes) -> int:
    """Bytes that the header of a Matroska (WebM), MP4 (QuickTime), AVI or FLV file counts and that `data` lacks; 0 for
    other files, and for those that were written to a stream, before their size was known. An MPEG transport stream has
    no such header, and a recording of one may end anywhere."""
    if data.startswith(_EBML):
        ends = _matroska(data)
    elif data[4:8] in (b"ftyp", *_BOXES):
        ends = _mp4(data)
    elif data.startswith(b"RIFF") and data[8:12] == b"AVI ":
        ends = _avi(data)
    elif data.startswith(b"FLV\x01"):
        ends = _flv(data)
    else:
        return 0
    return max(0, max(ends, default=0) - len(data))


def _matroska(data: bytes) -> Iterator[int]:
    """The end of the segment, which is all of a file after its first element."""
    start, size = _variable_int(data, len(_EBML))
    position = start + (size or 0)
    if data[position : position + len(_SEGMENT)] == _SEGMENT:
        start, size = _variable_int(data, position + len(_SEGMENT))
        if size is not None:
            yield start + size


def _variable_int(data: bytes, position: int) -> tuple[int, int | None]:
    """The position after an EBML integer, and its value: None for a size that was not known."""
    length = 9 - data[position].bit_length() if position < len(data) else 9
    value = int.from_bytes(data[position : position + length]) & ((1 << 7 * length) - 1)
    return position + length, value if length < 9 and value != (1 << 7 * length) - 1 else None


def _mp4(data: bytes) -> Iterator[int]:
    """The ends of the outermost boxes. A box of size 0 reaches to the end of the file, one of size 1 has 64 bits."""
    position = 0
    while position + 8 <= len(data):
        size, name, long_size = struct.unpack(">I4sQ", data[position : position + 16].ljust(16, b"\0"))
        size = long_size if size == 1 else size
        end = position + size
        if size < 8 or (end > len(data) and name not in _BOXES):
            return
        yield end
        position = end


def _avi(data: bytes) -> Iterator[int]:
    """The ends of the RIFF chunks, of which a large file has several."""
    position = 0
    while data[position : position + 4] == b"RIFF" and position + 8 <= len(data):
        (size,) = struct.unpack_from("<I", data, position + 4)
        if size in _STREAMED:
            return
        yield position + 8 + size
        position += 8 + size + size % 2


def _flv(data: bytes) -> Iterator[int]:
    """The size in the metadata, if the file also ends within a tag: tools that cut a file keep its metadata, but write
    whole tags."""
    size = 0
    # Each tag is followed by its size; the first size is that of no tag.
    end = int.from_bytes(data[5:9])
    position = end + 4
    while position < len(data) and data[position] in (_AUDIO, _VIDEO, _SCRIPT):
        end = position + _TAG_HEADER + int.from_bytes(data[position + 1 : position + 4])
        if data[position] == _SCRIPT and (found := _FILE_SIZE.search(data, position, end)):
            (value,) = struct.unpack(">d", found[1])
            size = int(value) if 0 < value < 2**63 else 0
        position = end + 4
    if len(data) < position and len(data) != end:
        yield size
