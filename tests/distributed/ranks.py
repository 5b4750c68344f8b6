"""Rank processes: started once, they run functions of the tests, each in a new gloo group.

`Ranks(forks).run(function, *arguments)` returns what `function` returned on each of two ranks, or raises the first
error.
As a script it is one rank.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import itertools
import multiprocessing
import os
import random
import re
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

_START_TIMEOUT = 120
_RUN_TIMEOUT = 120
# Two test runs on one machine start at different ports.
_places = itertools.count(random.SystemRandom().randrange(1000))


class RankFailed(Exception):
    """A function of a test failed on one rank; the message has the traceback of that rank."""


class Ranks:
    """The processes of a test session, each started when a test first needs so many."""

    def __init__(self, forks: Any) -> None:
        self._forks = forks
        self._processes: list[Any] = []
        self._connections: dict[int, Connection] = {}

    def _start_up_to(self, world: int) -> None:
        ranks = range(len(self._processes), world)
        with Listener(("127.0.0.1", 0)) as listener:
            listener._listener._socket.settimeout(_START_TIMEOUT)
            address = f"127.0.0.1:{listener.address[1]}"
            # Tensors in messages are sent with this key.
            key = multiprocessing.current_process().authkey
            listener._authkey = key
            self._processes += [_start(self._forks, address, key.hex(), str(rank)) for rank in ranks]
            connections = [listener.accept() for _ in ranks]
        self._connections |= {c.recv(): c for c in connections}

    def run(
        self, function: Callable[..., Any], *arguments: Any, world: int = 2, timeout: float = _RUN_TIMEOUT
    ) -> list[Any]:
        """Call `function(*arguments)` on each rank; processes beyond `world` stay idle."""
        if world > len(self._processes):
            self._start_up_to(world)
        port = free_port()
        for rank in range(world):
            task = (function.__code__.co_filename, function.__name__, arguments, world, port)
            self._connections[rank].send(task)
        answers = []
        for rank in range(world):
            if not self._connections[rank].poll(timeout):
                self.close()
                raise RankFailed(f"rank {rank} did not answer within {timeout} s")
            try:
                answers.append(self._connections[rank].recv())
            except EOFError:
                self.close()
                raise RankFailed(f"rank {rank} ended, see its output") from None
        for rank, (error, _) in enumerate(answers):
            if error is not None:
                raise RankFailed(f"rank {rank}:\n{error}")
        return [value for _, value in answers]

    def close(self) -> None:
        """End the processes; the next test starts others."""
        for connection in self._connections.values():
            connection.close()
        for process in self._processes:
            process.kill()
            if isinstance(process, subprocess.Popen):
                process.wait()
        self._processes.clear()
        self._connections.clear()


def _start(forks: Any, *arguments: str) -> Any:
    import torch

    if not torch.cuda.is_available():
        return forks.start(__file__, *arguments)
    # A fork cannot use CUDA, which imports of libraries initialize in the process that forks.
    return subprocess.Popen([sys.executable, "-P", __file__, *arguments], env={**os.environ, "OMP_NUM_THREADS": "1"})


def free_port() -> int:
    """A port that no other process gets before it is used: the system assigns higher ones, and each pytest-xdist worker
    has a range of a thousand.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    while True:
        port = 10_000 + 1000 * (worker % 20) + next(_places) % 1000
        with contextlib.suppress(OSError), socket.socket() as s:
            s.bind(("127.0.0.1", port))
            return port


def _load(path: str) -> Any:
    # Two folders may have files of the same name.
    name = "ranks_" + re.sub(r"\W", "_", path.removesuffix(".py"))
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None, path
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


def _serve(connection: Connection, rank: int) -> None:
    import torch

    from opslot.distributed import destroy_parallel_state
    from opslot.trainer import loss_curve

    torch.set_num_threads(1)
    # For files that share helpers, `from tests.x import y`; pytest adds it to the path of its own process.
    sys.path.append(str(Path(__file__).parents[2]))
    if not torch.cuda.is_available():
        _load(str(Path(__file__).parents[1] / "interpreter.py")).speed_up()
    # Plotting a loss curve takes as long as the run.
    loss_curve.draw_loss_curve = lambda rows, path, **_: path.touch()
    # What exists now stays, so that `gc.collect` visits only what the tests leave.
    gc.freeze()
    connection.send(rank)
    idle_threads = len(os.listdir("/proc/self/task"))
    while True:
        path, function, arguments, world, port = connection.recv()
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(world),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
        error, value = None, None
        try:
            value = getattr(_load(path), function)(*arguments)
        except Exception:
            error = traceback.format_exc()
        with contextlib.suppress(Exception):
            destroy_parallel_state()
        # Groups in reference cycles, and of compiled models, keep threads, which wake a hundred times a second.
        if len(os.listdir("/proc/self/task")) > idle_threads + 8:
            if "torch._dynamo" in sys.modules:
                torch._dynamo.reset()
            gc.collect()
        connection.send((error, value))


if __name__ == "__main__":
    host, port = sys.argv[1].split(":")
    key = bytes.fromhex(sys.argv[2])
    multiprocessing.current_process().authkey = key
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        _serve(Client((host, int(port)), authkey=key), int(sys.argv[3]))
