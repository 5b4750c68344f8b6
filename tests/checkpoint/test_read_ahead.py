"""A rank prefetches exactly the bytes that it keeps."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from opslot.checkpoint import load_weights
from opslot.checkpoint.load import _byte_range
from opslot.checkpoint.mapping import MappedSlice
from opslot.checkpoint.safetensors_file import TensorEntry
from opslot.checkpoint.tensor_slice import TensorSlice


@pytest.mark.parametrize(
    ("shape", "placement", "region", "rows"),
    [
        ((6, 4), TensorSlice.whole("w", (6, 4)), (slice(0, 6), slice(0, 4)), (0, 6)),
        ((6, 4), TensorSlice.whole("w", (6, 4)), (slice(2, 5), slice(0, 4)), (2, 5)),
        ((6, 4), TensorSlice.whole("w", (6, 4)), (slice(0, 6), slice(1, 3)), (0, 6)),
        # [4, 6] in the model, stored as [6, 4]: the columns of the slice are rows in the file.
        ((6, 4), TensorSlice.whole("w", (4, 6), transposed=True), (slice(0, 4), slice(2, 5)), (2, 5)),
        # One of three experts [6, 4] with dim 1 sharded.
        (
            (6, 4),
            TensorSlice("w", (slice(1, 2), slice(0, 6), slice(0, 4)), (6, 4)),
            (slice(0, 3), slice(3, 6), slice(0, 4)),
            (3, 6),
        ),
    ],
)
def test_byte_range_of_a_slice(shape: Any, placement: TensorSlice, region: Any, rows: tuple[int, int]) -> None:
    entry = TensorEntry("w", Path("f"), torch.float32, shape, 1000, 4 * shape[0] * shape[1])
    row_bytes = 4 * shape[1]
    assert _byte_range(MappedSlice(entry, placement), region) == (
        1000 + rows[0] * row_bytes,
        1000 + rows[1] * row_bytes,
    )


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system takes no such advice")
def test_every_byte_is_prefetched_once(moe_folder: Path, make_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda _file, _start, length, _advice: asked.append(length))
    report = load_weights(make_model("qwen3_moe", device="meta"), moe_folder)
    assert sum(asked) == report.bytes_read
