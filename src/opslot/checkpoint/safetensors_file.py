"""One safetensors file: its header checked to the byte, its tensors mapped, a new one written as a stream.

Format: 8 bytes with the header's length (little-endian), a JSON header {name: {dtype, shape, data_offsets}},
then the tensors' bytes without gaps (https://github.com/huggingface/safetensors#format). Headers are read
here rather than through the safetensors package because a bad file must be named with what was expected and
found, and because a stream of tensors can then be written without ever holding a shard in memory.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opslot._base.errors import CheckpointError

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

_LENGTH_BYTES = 8
_UNREADABLE = "check its permissions and its disk, or copy it to a local disk"
_MAX_HEADER_BYTES = 100_000_000
_AGAIN = "copy or download the file again"


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor as a file's header describes it.

    Attributes:
        name: the tensor's name in the file.
        file: the file that holds it.
        dtype, shape: as stored.
        start: first byte, counted from the beginning of the file.
        nbytes: bytes it occupies.
    """

    name: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor of a model, or one to be written: its name, dtype and global shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> TensorSpec:
        return cls(name, tensor.dtype, tuple(tensor.shape))

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def _corrupt(file: Path, found: str) -> CheckpointError:
    return CheckpointError(f"{file} is not a whole safetensors file: {found}; {_AGAIN}")


def read_header(file: Path) -> list[TensorEntry]:
    """The tensors of `file`, in the order of their bytes.

    Raises:
        CheckpointError: the file is missing, truncated, of another length than in its header, or its header is
            corrupt.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            prefix = stream.read(_LENGTH_BYTES)
            if len(prefix) < _LENGTH_BYTES:
                raise _corrupt(file, f"{size} bytes, fewer than the {_LENGTH_BYTES} that hold the header's length")
            length = int.from_bytes(prefix, "little")
            if length > min(size - _LENGTH_BYTES, _MAX_HEADER_BYTES):
                raise _corrupt(file, f"its header should take {length} bytes, the file has {size}")
            raw = stream.read(length)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror or error}", hint=_UNREADABLE) from error
    try:
        header = json.loads(raw)
        fields = [(name, value) for name, value in header.items() if name != "__metadata__"]
        entries = [_entry(file, name, value, _LENGTH_BYTES + length) for name, value in fields]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _corrupt(file, f"its header is corrupt ({type(error).__name__}: {error})") from error
    entries.sort(key=lambda entry: (entry.start, entry.nbytes))
    end = _LENGTH_BYTES + length
    for entry in entries:
        if entry.start != end:
            raise _corrupt(file, f"{entry.name} starts at byte {entry.start}, expected {end}")
        end += entry.nbytes
    if end != size:
        raise _corrupt(file, f"its header accounts for {end} bytes, the file has {size}")
    return entries


def _entry(file: Path, name: str, value: dict[str, Any], base: int) -> TensorEntry:
    if value["dtype"] not in DTYPES:
        raise CheckpointError(
            f"{file}: {name} has dtype {value['dtype']!r}, which opslot does not read",
            hint=f"convert it to one of {', '.join(DTYPES)}",
        )
    dtype, shape, offsets = DTYPES[value["dtype"]], value["shape"], value["data_offsets"]
    if not _are_integers(shape) or not _are_integers(offsets):
        raise ValueError(f"{name}: shape {str(shape)[:60]} and data_offsets {str(offsets)[:60]} must be integers")
    shape, (begin, end) = tuple(shape), offsets
    nbytes = math.prod(shape) * dtype.itemsize
    if min(shape, default=0) < 0 or begin < 0 or end - begin != nbytes:
        raise ValueError(
            f"{name}: {value['dtype']} {list(shape)} takes {nbytes} bytes, data_offsets give {end - begin}"
        )
    return TensorEntry(name, file, dtype, shape, base + begin, nbytes)


def _are_integers(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int for value in values)


class MappedFile:
    """The bytes of a safetensors file, mapped and read from disk only where a view is touched.

    The mapping lasts as long as this object or a view of it.
    """

    def __init__(self, file: Path) -> None:
        try:
            with file.open("rb") as stream:
                # Copy-on-write, because torch requires writable memory; nothing here ever writes to it.
                self._bytes = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
                self._descriptor = os.dup(stream.fileno())
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{file} cannot be mapped: {error}", hint=_UNREADABLE) from error

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)

    def read_ahead(self, start: int, stop: int) -> None:
        """Have the system read the bytes [start, stop) into its cache, and return before it has.

        Page faults of several threads would read small blocks in random order.
        """
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, start, stop - start, os.POSIX_FADV_WILLNEED)

    def view(self, entry: TensorEntry) -> Tensor:
        """The tensor of `entry`, sharing the file's pages; do not write to it."""
        if entry.nbytes == 0:
            return torch.empty(entry.shape, dtype=entry.dtype)
        count = math.prod(entry.shape)
        return torch.frombuffer(self._bytes, dtype=entry.dtype, count=count, offset=entry.start).view(entry.shape)


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor in row-major order, copied only if it is strided or on a device."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy().data) if flat.numel() else memoryview(b"")


def write_safetensors(file: Path, specs: Sequence[TensorSpec], tensors: Iterable[Tensor]) -> None:
    """Write `file` tensor by tensor; only the tensor being written is in memory. The file is on the disk on
    return.

    Args:
        file: path to create or overwrite.
        specs: the tensors, in the order of their bytes.
        tensors: of the specs, on any device; each is taken when the one before is written.

    Raises:
        OSError: the disk is full or the path cannot be written.
    """
    with file.open("wb") as stream:
        stream.write(_header(specs))
        for spec, tensor in zip(specs, tensors, strict=True):
            assert tensor.dtype == spec.dtype, f"{spec.name}: promised {spec.dtype}, produced {tensor.dtype}"
            assert tuple(tensor.shape) == spec.shape, f"{spec.name}: promised {spec.shape}, got {tuple(tensor.shape)}"
            stream.write(tensor_bytes(tensor))
        stream.flush()
        os.fsync(stream.fileno())


def _header(specs: Iterable[TensorSpec]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for spec in specs:
        begin, end = end, end + spec.nbytes
        header[spec.name] = {"dtype": NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    # Spaces up to a multiple of 8 keep the first tensor aligned, as the format advises.
    text += b" " * (-len(text) % _LENGTH_BYTES)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text
