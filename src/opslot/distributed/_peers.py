"""Detecting that another rank of this machine was killed."""

from __future__ import annotations

import contextlib
import datetime
import os
import select
import time
from pathlib import Path

import torch.distributed as dist

_REGISTRATION_TIMEOUT = datetime.timedelta(seconds=5)


class LocalPeers:
    """The processes of the other ranks on this machine.

    Each rank writes its process id to the store; a pidfd of the process becomes readable when it ends. Ranks of other
    machines are not watched, nor any on systems without pidfds.
    """

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self._handles: dict[int, int] = {}
        self._unknown: set[int] = set()
        self._lost: set[int] = set()
        self._machine = _machine()
        if self._machine is None:
            return
        rank, world = dist.get_rank(), dist.get_world_size()
        here = int(os.environ.get("LOCAL_WORLD_SIZE", world))
        first = rank - int(os.environ.get("LOCAL_RANK", rank)) if here < world else 0
        self._unknown = set(range(first, min(first + here, world))) - {rank}
        store.set(_key(rank), f"{self._machine} {os.getpid()}")
        # After the rank that hosts the store is killed, no process id can be read. Late ranks are found in `lost`.
        with contextlib.suppress(dist.DistError):
            store.wait([_key(other) for other in self._unknown], _REGISTRATION_TIMEOUT)
        self._find_lost()

    def lost(self, seconds: float = 0.0) -> int | None:
        """The lowest rank whose process has ended, waiting up to `seconds` for one to end."""
        deadline = time.monotonic() + seconds
        while not self._find_lost() and time.monotonic() < deadline:
            time.sleep(0.02)
        return min(self._lost, default=None)

    def close(self) -> None:
        for handle in self._handles.values():
            os.close(handle)
        self._handles.clear()
        self._unknown.clear()

    def _find_lost(self) -> bool:
        try:
            for rank in [rank for rank in self._unknown if self._store.check([_key(rank)])]:
                self._open(rank)
        except dist.DistError:
            self._unknown.clear()
        poll = select.poll()
        for handle in self._handles.values():
            poll.register(handle, select.POLLIN)
        ended = {handle for handle, _ in poll.poll(0)}
        self._lost |= {rank for rank, handle in self._handles.items() if handle in ended}
        return bool(self._lost)

    def _open(self, rank: int) -> None:
        self._unknown.remove(rank)
        machine, _, process = self._store.get(_key(rank)).decode().rpartition(" ")
        if machine != self._machine:
            return
        try:
            self._handles[rank] = os.pidfd_open(int(process))
        except ProcessLookupError:
            self._lost.add(rank)
        except OSError:
            # The kernel or a sandbox does not allow pidfds; a killed rank then shows only as a broken connection.
            return


def _key(rank: int) -> str:
    return f"process/{rank}"


def _machine() -> str | None:
    """Identifies the namespace of process ids; None on systems without pidfds."""
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None
