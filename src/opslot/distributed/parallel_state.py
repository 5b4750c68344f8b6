"""Device meshes and sizes of a process, built once by `init_parallel_state`.

The world is `dp_replicate * dp_shard * sp` ranks, the last axis fastest, so that ranks of one sequence are neighbors.
Parameters see the same ranks as `dp_replicate * fsdp`, experts as `dp_replicate * ep_fsdp * ep`, where
`fsdp = ep_fsdp * ep = dp_shard * sp`:

    axis          ranks along it
    dp_replicate  hold the same shards (HSDP)
    dp_shard      hold different shards and train on different samples
    sp            hold different shards and parts of the same sequences (Ulysses)
    fsdp          hold different shards of the parameters other than experts
    ep            hold different experts
    ep_fsdp       hold different shards of the same experts
"""

from __future__ import annotations

import contextlib
import datetime
import operator
import os
import socket
import sys
import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from opslot._base.device import usable_device
from opslot._base.errors import ConfigError, ParallelError
from opslot._base.launcher import (
    exit_with_launcher,
    is_first_local_rank,
    launched_by_torchrun,
    launched_rank,
    launched_with_rendezvous,
    launched_world_size,
)
from opslot._base.logging import get_logger

logger = get_logger(__name__)

# A rank imports for some seconds, on a loaded machine for a minute.
_REPORT_AFTER = 60
_SHOWN = 8
# Added to the number of ranks that have started.
_FAILED = -(1 << 40)


@dataclass(frozen=True, eq=False)
class ParallelState:
    """Sizes of the mesh axes, and the meshes of this process.

    Attributes:
        dp_replicate, dp_shard, sp, ep: sizes of the axes.
        device: device of this process.
        mesh: axes (dp_replicate, dp_shard, sp); None in a single process without a process group, as the others are.
        dense_mesh: axes (dp_replicate, fsdp).
        expert_mesh: axes (dp_replicate, ep_fsdp, ep).
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    sp: int = 1
    ep: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    mesh: DeviceMesh | None = None
    dense_mesh: DeviceMesh | None = None
    expert_mesh: DeviceMesh | None = None

    @property
    def world_size(self) -> int:
        return self.dp_replicate * self.dp_shard * self.sp

    @property
    def rank(self) -> int:
        return dist.get_rank() if self.mesh is not None else 0

    @property
    def dp_size(self) -> int:
        """Ranks that train on different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def dp_rank(self) -> int:
        return self.rank // self.sp

    @property
    def sp_rank(self) -> int:
        return self.rank % self.sp

    @property
    def ep_rank(self) -> int:
        return self.rank % self.ep

    @property
    def ep_fsdp(self) -> int:
        """Ranks over which the experts of one rank are sharded."""
        return self.dp_shard * self.sp // self.ep

    @property
    def sp_group(self) -> ProcessGroup | None:
        """The ranks that share this rank's sequences; None without sequence parallelism."""
        return self.mesh["sp"].get_group() if self.mesh is not None and self.sp > 1 else None

    @property
    def ep_group(self) -> ProcessGroup | None:
        """The ranks that together hold all experts; None without expert parallelism."""
        return self.expert_mesh["ep"].get_group() if self.expert_mesh is not None and self.ep > 1 else None

    @property
    def ep_mesh(self) -> DeviceMesh | None:
        return self.expert_mesh["ep"] if self.expert_mesh is not None and self.ep > 1 else None

    @property
    def fsdp_mesh(self) -> DeviceMesh | None:
        """Mesh for the parameters other than experts; with a dp_replicate axis if dp_replicate > 1."""
        return self.dense_mesh if self.dense_mesh is None or self.dp_replicate > 1 else self.dense_mesh["fsdp"]

    @property
    def expert_fsdp_mesh(self) -> DeviceMesh | None:
        """Mesh for the parameters of this rank's experts."""
        if self.expert_mesh is None:
            return None
        return self.expert_mesh["dp_replicate", "ep_fsdp"] if self.dp_replicate > 1 else self.expert_mesh["ep_fsdp"]

    def __str__(self) -> str:
        sizes = {"dp_replicate": self.dp_replicate, "dp_shard": self.dp_shard, "sp": self.sp, "ep": self.ep}
        return " x ".join(f"{name} {size}" for name, size in sizes.items())


_state: ParallelState | None = None


def init_parallel_state(
    *,
    dp_replicate: int = 1,
    dp_shard: int | None = None,
    sp: int = 1,
    ep: int = 1,
    device_type: str | None = None,
    timeout: datetime.timedelta | None = None,
    group_of_one: bool = False,
) -> ParallelState:
    """Build the process group, if there is none yet, and the meshes. Every rank calls it with the same sizes.

    Args:
        dp_replicate: groups of ranks that hold the same shards.
        dp_shard: ranks that shard the parameters and train on different samples; None uses the remaining ranks.
        sp: ranks that share a sequence.
        ep: ranks over which the experts are sharded, a part of dp_shard * sp.
        device_type: "cuda" or "cpu"; None uses a GPU if there is one.
        timeout: of collectives; None uses torch's default.
        group_of_one: make a process group for a single process too, which FSDP needs; a process alone uses FSDP to
            offload parameters, and for the mixed precision of large models.

    Returns:
        The state, which `get_parallel_state` returns from now on. Calling it again with the same sizes returns it too.

    Raises:
        ConfigError: the sizes do not multiply to the world's, the state was built with others, the machine lacks
            the devices, or some of the launcher's environment variables are missing.
    """
    global _state
    try:
        device = _own_device(device_type or ("cuda" if torch.cuda.is_available() else "cpu"))
        world = dist.get_world_size() if dist.is_initialized() else launched_world_size()
        dp_shard = check_sizes(world, dp_replicate, dp_shard, sp, ep)
    except ConfigError as error:
        report_failed_start(error)
        raise
    if _state is not None and _state.mesh is not None:
        if (_state.dp_replicate, _state.dp_shard, _state.sp, _state.ep) != (dp_replicate, dp_shard, sp, ep):
            raise ConfigError(
                f"the parallel state is {_state} already, so it cannot be dp_replicate "
                f"{dp_replicate} x dp_shard {dp_shard} x sp {sp} x ep {ep}",
                hint="build it once, at the start; call destroy_parallel_state() first to build another",
            )
        return _state
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if _join_group(device, timeout, group_of_one):
        _state = _with_meshes(dp_replicate, dp_shard, sp, ep, device)
    else:
        _state = ParallelState(device=device)
    return _state


def _own_device(device_type: str) -> torch.device:
    """The device of this process; all processes of a machine raise the same error."""
    device = usable_device(device_type)
    if device.type != "cuda":
        return device
    rank = int(os.environ.get("LOCAL_RANK") or 0)
    processes, gpus = int(os.environ.get("LOCAL_WORLD_SIZE") or rank + 1), torch.cuda.device_count()
    if processes > gpus:
        raise ConfigError(
            f"each process needs its own GPU, but this machine has {processes} processes and {gpus} GPUs",
            hint=f"start {gpus} (torchrun --nproc-per-node {gpus}), or set device_type to cpu",
        )
    return torch.device("cuda", rank)


def _join_group(device: torch.device, timeout: datetime.timedelta | None, group_of_one: bool) -> bool:
    """Build the process group if there is none; returns whether there is one. A single process needs `group_of_one`."""
    if dist.is_initialized():
        return True
    # No device_id: with one, meshes split the group, and gloo's split reads out of bounds in a process whose earlier
    # group was of another size (torch 2.11).
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if launched_with_rendezvous():
        exit_with_launcher()
        _wait_for_store()
        # Alive until the group has its own: rank 0 hosts the store without torchrun.
        store = _wait_for_start(timeout or default_pg_timeout)
        dist.init_process_group(backend, timeout=timeout)
        del store
    elif group_of_one:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return dist.is_initialized()


def _wait_for_store() -> None:
    """Wait until the store that torchrun or rank 0 hosts accepts connections.

    torch alone would try for as long as a collective may take, half an hour by default.

    Raises:
        ParallelError: nothing answers at its address.
    """
    if not launched_by_torchrun() and os.environ["RANK"] == "0":
        return
    address, seconds = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), _connect_seconds()
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection(address, timeout=seconds).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise ParallelError(
                    f"rank {os.environ['RANK']} cannot connect to {address[0]}:{address[1]}, tried for {seconds} s",
                    found=str(error),
                    hint="check that the launcher and rank 0 still run, and MASTER_ADDR and MASTER_PORT",
                ) from error
            time.sleep(0.1)


def _wait_for_start(timeout: datetime.timedelta) -> dist.Store:
    """Wait until all ranks have started; returns a connection to the store.

    In Python: torch waits in C++, where a rank ignores SIGINT and SIGTERM, and torchrun kills it after 30 seconds.

    Raises:
        ParallelError: some have not started within `timeout`, or one has failed.
    """
    world, store = launched_world_size(), _launched_store(timeout)
    key = _start_key("started")
    begin = time.monotonic()
    deadline, report_at = begin + timeout.total_seconds(), begin + _REPORT_AFTER
    store.set(_start_key(str(launched_rank())), "")
    started = store.add(key, 1)
    while started < world:
        if started < 0:
            raise ParallelError(store.get(_start_key("failure")).decode())
        if time.monotonic() > deadline:
            raise ParallelError(
                f"{world - started} of {world} ranks have not started within {timeout.total_seconds():.0f} s",
                found=_missing_ranks(store),
                hint="check that the launcher started them all, and their output",
            )
        if time.monotonic() > report_at and is_first_local_rank():
            logger.warning(
                "waiting for %s to start, for up to %.0f s (timeout= of init_parallel_state); check that the launcher "
                "started all ranks, and their output",
                _missing_ranks(store),
                timeout.total_seconds(),
            )
            report_at = deadline
        # Thousands of ranks must not load the store, which torchrun's agents use too: 5,000 requests/s at most.
        time.sleep(max(0.02, world / 5000))
        started = store.add(key, 0)
    return store


def _missing_ranks(store: dist.Store) -> str:
    """The ranks that have not started, such as "rank 3" or "ranks 8, 9, 10, 11 and 4 more"."""
    ranks = [str(rank) for rank in range(launched_world_size()) if not store.check([_start_key(str(rank))])]
    more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks[:_SHOWN])}{more}"


def report_failed_start(error: Exception) -> None:
    """Let the ranks that wait for this one to start raise its error; without torchrun or a wait, does nothing.

    torchrun ends the ranks of this machine, but not those of others.
    """
    if dist.is_initialized() or not launched_by_torchrun():
        return
    with contextlib.suppress(ConfigError, dist.DistError, OSError):
        if launched_with_rendezvous() and launched_world_size() > 1:
            store = _launched_store(datetime.timedelta(seconds=10))
            store.set(_start_key("failure"), f"rank {launched_rank()} failed: {error}")
            store.add(_start_key("started"), _FAILED)


def _launched_store(timeout: datetime.timedelta) -> dist.Store:
    """The store that torchrun, or rank 0 without it, hosts."""
    world, hosts = launched_world_size(), not launched_by_torchrun() and launched_rank() == 0
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(host, port, world, hosts, timeout, wait_for_workers=False, multi_tenant=True)


def _start_key(name: str) -> str:
    # torchrun restarts ranks with the same store.
    return f"opslot/{name}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def _connect_seconds() -> int:
    """torchrun hosts the store before it starts the ranks; without it, rank 0 may take minutes to import."""
    if not launched_by_torchrun():
        return 300
    return 10 if os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE") else 60


def _with_meshes(dp_replicate: int, dp_shard: int, sp: int, ep: int, device: torch.device) -> ParallelState:
    def mesh(**axes: int) -> DeviceMesh:
        return init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))

    fsdp = dp_shard * sp
    expert_mesh = mesh(dp_replicate=dp_replicate, ep_fsdp=fsdp // ep, ep=ep)
    # Lets a norm over both of these axes be reduced at once.
    expert_mesh["ep_fsdp", "ep"]._flatten("experts")
    return ParallelState(
        dp_replicate,
        dp_shard,
        sp,
        ep,
        device,
        mesh(dp_replicate=dp_replicate, dp_shard=dp_shard, sp=sp),
        mesh(dp_replicate=dp_replicate, fsdp=fsdp),
        expert_mesh,
    )


def get_parallel_state() -> ParallelState:
    """The state of this process. A single process that built none gets the trivial state.

    Raises:
        ParallelError: there are several processes and `init_parallel_state` was not called.
    """
    if _state is not None:
        return _state
    world = dist.get_world_size() if dist.is_initialized() else launched_world_size()
    if world > 1:
        raise ParallelError(
            f"there are {world} processes, but no parallel state",
            hint="call opslot.distributed.init_parallel_state(sp=..., ep=...) on every rank, before the model",
        )
    return ParallelState()


def destroy_parallel_state(*, keep_group: bool = False) -> None:
    """Reset the state and destroy the process group, or keep the group for other meshes over the same processes."""
    global _state
    _state = None
    _forget_meshes()
    if dist.is_initialized() and not keep_group:
        dist.destroy_process_group()


# Releases of torch have others of these, and no public function for all.
_CACHES_OF_MESHES = (
    ("torch._C", "_clear_DTensor_sharding_propagator_cache"),
    (
        "torch.distributed.tensor._api",
        "DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear",
    ),
    ("torch.distributed.tensor._redistribute", "_gen_transform_infos.cache_clear"),
    ("torch.distributed.tensor._redistribute", "clear_redistribute_planner_cache"),
    ("torch.distributed.tensor._collective_utils", "MeshTopoInfo.build_from_mesh.cache_clear"),
)


def _forget_meshes() -> None:
    """Clear DTensor's caches, which keep meshes, and so the communicators and threads of their groups, until exit."""
    for module, function in _CACHES_OF_MESHES:
        # None of a module that was not imported, which has cached nothing.
        with contextlib.suppress(AttributeError):
            operator.attrgetter(function)(sys.modules.get(module))()


def check_sizes(world: int, dp_replicate: int = 1, dp_shard: int | None = None, sp: int = 1, ep: int = 1) -> int:
    """What dp_shard is for `world` processes; ConfigError naming the sizes that would fit."""
    for name, size in {"dp_replicate": dp_replicate, "dp_shard": dp_shard, "sp": sp, "ep": ep}.items():
        if size is not None and (not isinstance(size, int) or size < 1):
            raise ConfigError(f"{name}={size!r} is not a number of ranks", hint="use a whole number, at least 1")
    if world % sp:
        raise ConfigError(f"sp={sp} does not divide the {world} processes", hint=f"use one of {divisors(world)}")
    if world // sp % dp_replicate:
        raise ConfigError(
            f"dp_replicate={dp_replicate} does not divide the {world // sp} ranks that sp={sp} leaves of {world} "
            "processes",
            hint=f"use one of {divisors(world // sp)}",
        )
    rest = world // sp // dp_replicate
    if dp_shard is not None and dp_shard != rest:
        raise ConfigError(
            f"dp_replicate={dp_replicate} x dp_shard={dp_shard} x sp={sp} is "
            f"{dp_replicate * dp_shard * sp}, but there are {world} processes",
            hint=f"set dp_shard to {rest}, leave it out, or start {dp_replicate * dp_shard * sp} processes",
        )
    if rest * sp % ep:
        raise ConfigError(
            f"ep={ep} does not divide the {rest * sp} ranks of dp_shard={rest} x sp={sp}",
            hint=f"use one of {divisors(rest * sp)}",
        )
    return rest


def divisors(number: int) -> str:
    return ", ".join(str(size) for size in range(1, number + 1) if number % size == 0)
