"""The meshes, the coordinates of ranks, and invalid sizes."""

import datetime
import gc
from pathlib import Path

import pytest
import torch
from torch.distributed import TCPStore
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from opslot._base.errors import ConfigError, ParallelError
from opslot.distributed import destroy_parallel_state, get_parallel_state, init_parallel_state, parallel_state
from opslot.distributed.parallel_state import check_sizes


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    yield
    destroy_parallel_state()


def gloo_threads():
    gc.collect()
    return sum("gloo" in file.read_text() for file in Path("/proc/self/task").glob("*/comm"))


def gloo_threads_that_a_state_leaves():
    # Other tests may have left some.
    before = gloo_threads()
    mesh = init_parallel_state(device_type="cpu").fsdp_mesh
    x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    (x @ x.redistribute(mesh, [Replicate()])).full_tensor()
    del x, mesh
    destroy_parallel_state()
    return gloo_threads() - before


@pytest.mark.skipif(torch.__version__ < "2.13", reason="the DTensor of torch 2.11 keeps meshes elsewhere too")
def test_threads_of_groups_end_with_the_state(ranks):
    """DTensor's caches kept the meshes, and each group has a thread that wakes a hundred times a second."""
    assert max(ranks.run(gloo_threads_that_a_state_leaves)) <= 0


def test_single_process_has_a_trivial_state():
    state = get_parallel_state()
    assert (state.world_size, state.rank, state.dp_rank, state.sp_rank, state.ep_rank) == (1, 0, 0, 0, 0)
    assert state.sp_group is None
    assert state.ep_group is None
    assert state.fsdp_mesh is None


def test_several_processes_without_a_state_raise(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ParallelError, match=r"4 processes.*\n.*init_parallel_state"):
        get_parallel_state()


def test_one_process_is_built_without_a_group():
    state = init_parallel_state(device_type="cpu")
    assert state is get_parallel_state()
    assert state.mesh is None
    assert not torch.distributed.is_initialized()


def test_missing_device_raises(monkeypatch):
    with pytest.raises(ConfigError, match="device 'tpu' is not a valid device"):
        init_parallel_state(device_type="tpu")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match="device 'cuda': the number of GPUs that torch finds here is 0"):
        init_parallel_state(device_type="cuda")


def test_more_processes_than_gpus_raise_on_each(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    for rank in range(4):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        with pytest.raises(ConfigError, match=r"4 processes and 2 GPUs\n  hint: start 2"):
            init_parallel_state(device_type="cuda")


def test_valid_sizes():
    assert check_sizes(8, dp_replicate=1, dp_shard=None, sp=2, ep=8) == 4
    assert check_sizes(8, dp_replicate=2, dp_shard=None, sp=2, ep=4) == 2
    assert check_sizes(8, dp_replicate=2, dp_shard=4, sp=1, ep=1) == 4


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"sp": 3}, r"sp=3 does not divide the 8 processes\n  hint: use one of 1, 2, 4, 8"),
        ({"sp": 2, "ep": 3}, r"ep=3 does not divide the 8 ranks of dp_shard=4 x sp=2\n  hint: use one of 1, 2, 4, 8"),
        ({"dp_replicate": 2, "ep": 8}, r"ep=8 does not divide the 4 ranks"),
        ({"dp_replicate": 3}, r"dp_replicate=3 does not divide the 8 ranks.*\n  hint: use one of 1, 2, 4, 8"),
        ({"dp_shard": 3}, r"is 3, but there are 8 processes\n  hint: set dp_shard to 8, leave it out, or start 3"),
        ({"sp": 0}, r"sp=0 is not a number of ranks\n  hint: use a whole number, at least 1"),
        ({"ep": "2"}, r"ep='2' is not a number of ranks"),
        ({"dp_shard": 4.0}, r"dp_shard=4\.0 is not a number of ranks"),
    ],
)
def test_invalid_sizes_raise_with_fitting_sizes(sizes, message):
    with pytest.raises(ConfigError, match=message):
        check_sizes(8, **{"dp_replicate": 1, "dp_shard": None, "sp": 1, "ep": 1, **sizes})


def places(sizes):
    state = init_parallel_state(device_type="cpu", **sizes)
    again = init_parallel_state(device_type="cpu", **sizes)
    groups = {
        name: torch.distributed.get_process_group_ranks(group) if group else None
        for name, group in (("sp", state.sp_group), ("ep", state.ep_group))
    }
    return {
        "same": again is state is get_parallel_state(),
        "place": (state.rank, state.dp_rank, state.sp_rank, state.ep_rank),
        "fsdp": state.fsdp_mesh.mesh.tolist(),
        "expert_fsdp": state.expert_fsdp_mesh.mesh.tolist(),
        **groups,
    }


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({}, ([(0, 0, 0, 0), (1, 1, 0, 0)], [0, 1], [[0, 1], [0, 1]], None, None)),
        ({"sp": 2}, ([(0, 0, 0, 0), (1, 0, 1, 0)], [0, 1], [[0, 1], [0, 1]], [0, 1], None)),
        ({"ep": 2}, ([(0, 0, 0, 0), (1, 1, 0, 1)], [0, 1], [[0], [1]], None, [0, 1])),
        ({"sp": 2, "ep": 2}, ([(0, 0, 0, 0), (1, 0, 1, 1)], [0, 1], [[0], [1]], [0, 1], [0, 1])),
        ({"dp_replicate": 2}, ([(0, 0, 0, 0), (1, 1, 0, 0)], None, None, None, None)),
    ],
)
def test_coordinates_on_two_ranks(ranks, sizes, expected):
    places_expected, fsdp, expert_fsdp, sp, ep = expected
    found = ranks.run(places, sizes)
    assert [f["place"] for f in found] == places_expected
    assert all(f["same"] for f in found)
    for rank, f in enumerate(found):
        assert (f["sp"], f["ep"]) == (sp, ep)
        if fsdp is None:
            assert f["fsdp"] == f["expert_fsdp"] == [[0], [1]]
        else:
            assert f["fsdp"] == fsdp
            assert f["expert_fsdp"] == expert_fsdp[rank]


def rebuild():
    init_parallel_state(device_type="cpu")
    init_parallel_state(device_type="cpu", sp=2)


def test_building_again_with_other_sizes_raises(ranks, rank_failed):
    with pytest.raises(rank_failed, match="the parallel state is dp_replicate 1 x dp_shard 2 x sp 1 x ep 1 already"):
        ranks.run(rebuild)


def test_group_of_one():
    state = init_parallel_state(device_type="cpu", group_of_one=True)
    assert state.fsdp_mesh.size() == 1
    assert state.sp_group is None


@pytest.mark.parametrize(
    ("world", "missing"), [(2, "rank 1"), (4, "ranks 1, 2, 3"), (12, "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 3 more")]
)
def test_rank_that_does_not_start_is_named(monkeypatch, free_port, caplog, world, missing):
    monkeypatch.setattr(parallel_state, "_REPORT_AFTER", 0.2)
    environment = {"WORLD_SIZE": str(world), "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    found = rf"{world - 1} of {world} ranks have not started within 1 s\n  found: {missing}\n  hint: "
    with pytest.raises(ParallelError, match=found):
        init_parallel_state(device_type="cpu", timeout=datetime.timedelta(seconds=1))
    assert [record.message.partition(" to start, for up to 1 s")[0] for record in caplog.records] == [
        f"waiting for {missing}"
    ]


def test_rank_that_fails_before_it_starts_is_named(monkeypatch, free_port):
    """As on two machines of which one lacks a file, or GPUs."""
    port = free_port()
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    environment = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in (environment | {"TORCHELASTIC_RUN_ID": "none"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="sp=3 does not divide the 2 processes"):
        init_parallel_state(device_type="cpu", sp=3)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(parallel_state, "exit_with_launcher", lambda: None)
    with pytest.raises(ParallelError, match="rank 1 failed: sp=3 does not divide the 2 processes\n  hint"):
        init_parallel_state(device_type="cpu", sp=2, timeout=datetime.timedelta(seconds=20))
    del store


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2, but RANK and MASTER_ADDR and MASTER_PORT are not set\n  hint: start the"),
        ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost"}, "WORLD_SIZE=2, but MASTER_PORT is not set"),
        ({"RANK": "1"}, "RANK=1, but WORLD_SIZE is not set\n  hint: start the run with torchrun"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2, but WORLD_SIZE is 2"),
        ({"WORLD_SIZE": "0"}, "RANK=0, but WORLD_SIZE is 0"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE='two', which is not a number"),
    ],
)
def test_incomplete_environment_raises(monkeypatch, environment, message):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        init_parallel_state(device_type="cpu")


@pytest.mark.parametrize("environment", [{"MASTER_ADDR": "head.cluster"}, {"WORLD_SIZE": "", "RANK": "0"}])
def test_cluster_environment_starts_no_group(monkeypatch, environment):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert init_parallel_state(device_type="cpu").mesh is None
