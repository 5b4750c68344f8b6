from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from opslot._base.errors import CheckpointError
from opslot.checkpoint.tensor_slice import (
    Region,
    TensorSlice,
    copy_overlap,
    full_region,
    intersect,
    is_numeric_cast,
    local_ranges,
    volume,
)


@st.composite
def region_pairs(draw: st.DrawFn) -> tuple[tuple[int, ...], Region, Region]:
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))

    def region() -> Region:
        starts = [draw(st.integers(0, n)) for n in shape]
        return tuple(slice(start, draw(st.integers(start, n))) for start, n in zip(starts, shape))

    return shape, region(), region()


@settings(max_examples=100, deadline=None)
@given(region_pairs())
def test_copy_overlap_of_two_regions(case: tuple[tuple[int, ...], Region, Region]) -> None:
    """Exactly the elements in both slices are copied."""
    shape, kept, stored = case
    target = torch.arange(1, 1 + volume(full_region(shape))).view(shape)
    destination = torch.zeros_like(target[kept])
    copy_overlap(destination, kept, target[stored], TensorSlice("x", stored, tuple(target[stored].shape)))
    mask = torch.zeros(shape, dtype=torch.bool)
    mask[stored] = True
    assert torch.equal(destination, (target * mask)[kept])
    shared = intersect(kept, stored)
    assert int(mask[kept].sum()) == (0 if shared is None else volume(shared))


def on_a_fake_mesh(rows: int, inner: int, outer: int) -> str | None:
    """Check one rank's part of a [rows, 4] parameter sharded on dim `inner`, then by FSDP on dim `outer`; the
    error if any.

    The mesh is 2 x 2 without communication, since sharding needs none. The two processes that run this are
    always its ranks 1 and 2 (torch caches a mesh's coordinates), so each is first on one axis and second on
    the other.
    """
    rank = 1 + int(os.environ["RANK"])
    dist.init_process_group("fake", rank=rank, world_size=4, store=FakeStore())
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "inner"))
    whole = torch.arange(rows * 4.0).view(rows, 4)
    part = whole.chunk(2, dim=inner)[mesh["inner"].get_local_rank()].contiguous()
    module = nn.Module()
    module.weight = nn.Parameter(DTensor.from_local(part, mesh["inner"], [Shard(inner)], run_check=False))
    fully_shard(module, mesh=mesh["fsdp"], shard_placement_fn=lambda parameter: Shard(outer))
    try:
        region = local_ranges(module.weight)
    except CheckpointError as error:
        return str(error)
    assert module.weight.to_local().numel() == whole.numel() // 4
    assert torch.equal(module.weight.to_local(), whole[region])
    return None


@pytest.mark.parametrize(("inner", "outer"), [(0, 1), (1, 0), (0, 0)])
def test_local_ranges_of_fsdp_over_another_sharding(ranks, inner: int, outer: int) -> None:
    """EP with FSDP within experts, tensor parallelism with FSDP, and both on one dim (a strided shard)."""
    assert ranks.run(on_a_fake_mesh, 8, inner, outer) == [None, None]


def test_uneven_strided_shard_raises(ranks) -> None:
    for message in ranks.run(on_a_fake_mesh, 6, 0, 0):
        assert "is not one region on this rank\n  hint: shard evenly" in message


def test_numeric_casts() -> None:
    for stored, wanted in ((torch.float32, torch.bfloat16), (torch.float16, torch.float64), (torch.int8, torch.int8)):
        assert is_numeric_cast(stored, wanted)
    for stored, wanted in (
        (torch.float8_e4m3fn, torch.bfloat16),
        (torch.int8, torch.bfloat16),
        (torch.float32, torch.int32),
        (torch.int32, torch.int64),
        (torch.float32, torch.complex64),
    ):
        assert not is_numeric_cast(stored, wanted)
