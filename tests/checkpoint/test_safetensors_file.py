from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from opslot._base.errors import CheckpointError
from opslot.checkpoint.safetensors_file import DTYPES, MappedFile, TensorSpec, read_header, write_safetensors

SMALL_SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
quick = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def random_bits(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if dtype is torch.bool:
        return torch.rand(shape) < 0.5
    count = math.prod(shape) * dtype.itemsize
    return torch.randint(0, 256, (count,), dtype=torch.uint8).view(dtype).reshape(shape)


def bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


@quick
@given(
    st.dictionaries(st.text(min_size=1, max_size=8), st.tuples(SMALL_SHAPES, st.sampled_from(list(DTYPES.values()))))
)
def test_safetensors_reads_what_opslot_writes(
    tmp_path: Path, described: dict[str, tuple[tuple[int, ...], torch.dtype]]
) -> None:
    tensors = {name: random_bits(*args) for name, args in described.items() if name != "__metadata__"}
    file = tmp_path / "ours.safetensors"
    specs = [TensorSpec.of(name, tensor) for name, tensor in tensors.items()]
    write_safetensors(file, specs, tensors.values())
    found = safetensors.torch.load_file(file)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert bits(found[name]) == bits(tensor)


@quick
@given(
    st.dictionaries(st.text(min_size=1, max_size=8), st.tuples(SMALL_SHAPES, st.sampled_from(list(DTYPES.values()))))
)
def test_opslot_reads_what_safetensors_writes(
    tmp_path: Path, described: dict[str, tuple[tuple[int, ...], torch.dtype]]
) -> None:
    tensors = {name: random_bits(*args) for name, args in described.items() if name != "__metadata__"}
    file = tmp_path / "theirs.safetensors"
    safetensors.torch.save_file(tensors, file)
    entries = {entry.name: entry for entry in read_header(file)}
    mapped = MappedFile(file)
    assert entries.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert entries[name].dtype == tensor.dtype
        assert bits(mapped.view(entries[name])) == bits(tensor)
        assert mapped.view(entries[name]).shape == tensor.shape


@pytest.fixture
def whole_file(tmp_path: Path) -> Path:
    file = tmp_path / "whole.safetensors"
    safetensors.torch.save_file({"a": torch.arange(6.0).view(2, 3), "b": torch.ones(5, dtype=torch.bfloat16)}, file)
    return file


def test_every_truncation_is_found(whole_file: Path) -> None:
    content = whole_file.read_bytes()
    for length in range(len(content)):
        whole_file.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=r"whole\.safetensors is not a whole safetensors file"):
            read_header(whole_file)


def test_truncation_names_expected_and_found_bytes(whole_file: Path) -> None:
    content = whole_file.read_bytes()
    whole_file.write_bytes(content[:-7])
    with pytest.raises(CheckpointError, match=rf"accounts for {len(content)} bytes, the file has {len(content) - 7}"):
        read_header(whole_file)
    whole_file.write_bytes(content + b"more")
    with pytest.raises(CheckpointError, match=rf"accounts for {len(content)} bytes, the file has {len(content) + 4}"):
        read_header(whole_file)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, r"takes 8 bytes, data_offsets give 4"),
        ({"a": {"dtype": "F4", "shape": [2], "data_offsets": [0, 8]}}, r"dtype 'F4', which opslot does not read"),
        ({"a": {"dtype": "F32", "shape": [2]}}, "data_offsets"),
        ({"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, -8]}}, "corrupt"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}}, "a starts at byte"),
        ({"a": {"dtype": "F32", "shape": ["2"], "data_offsets": [0, 8]}}, "must be integers"),
        ({"a": {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]}}, "must be integers"),
        ({"a": {"dtype": "F32", "shape": [True, 2], "data_offsets": [0, 8]}}, "must be integers"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0.0, 8.0]}}, "must be integers"),
        ({"a": {"dtype": "F32", "shape": [float("inf")], "data_offsets": [0, 8]}}, "must be integers"),
        ({"a": {"dtype": "F32", "shape": 2, "data_offsets": [0, 8]}}, "must be integers"),
        ({"a": {"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]}}, "corrupt"),
        (["a"], "corrupt"),
        ({"a": 3}, "corrupt"),
    ],
)
def test_corrupt_headers(tmp_path: Path, header: object, message: str) -> None:
    raw = json.dumps(header).encode()
    file = tmp_path / "bad.safetensors"
    file.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(16))
    with pytest.raises(CheckpointError, match=message):
        read_header(file)


def test_header_is_aligned_and_views_share_memory(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    write_safetensors(file, [TensorSpec("x", torch.float64, (3,))], [torch.arange(3, dtype=torch.float64)])
    (entry,) = read_header(file)
    mapped = MappedFile(file)
    assert entry.start % 8 == 0
    assert mapped.view(entry).data_ptr() == mapped.view(entry).data_ptr()
