"""Checks in worker processes: most of a check's time is compiling its kernel for each shape, on the host."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
import traceback
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from opslot._base.errors import KernelError

_Item = TypeVar("_Item", bound=Hashable)
_Result = TypeVar("_Result")
_MOST_WORKERS = 12


def most_workers() -> int:
    """The number of processes that helps on a GPU."""
    return min(_MOST_WORKERS, os.cpu_count() or 1)


def spoils_device(message: str) -> bool:
    """Whether a failure with this message leaves the process unusable for further checks."""
    return "CUDA error" in message


class Lost(str):
    """Why there is no result: "exited" or "was not done after 60 s"."""


class Processes:
    """Worker processes, kept from one batch of checks to the next because their imports take seconds.

    Each runs one item at a time, so that an item that ends its process or hangs is identified.

    Args:
        count: of processes. They start when there is work, and one that became unusable is replaced.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._idle: list[_Worker] = []
        self._busy: list[_Worker] = []

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in (*self._idle, *self._busy):
            worker.stop()
        self._idle, self._busy = [], []

    def run(
        self,
        function: Callable[[_Item], _Result],
        items: Sequence[_Item],
        spoils: Callable[[_Result], bool],
        limit: float | None = None,
    ) -> Iterator[tuple[_Item, _Result | Lost]]:
        """Call `function` on each item.

        Args:
            function: importable by name.
            items: picklable.
            spoils: whether a result means that its process is unusable.
            limit: seconds per item, including the start of its process.

        Yields:
            Items with their results, as they arrive. The result is `Lost` for an item that exceeds its limit, or whose
            process exits, and exits again in a new process.

        Raises:
            KernelError: `function` raised.
        """
        todo: deque[_Item] = deque(items)
        again: set[_Item] = set()
        try:
            while todo or self._busy:
                while todo and len(self._busy) < self._count:
                    item = todo.popleft()
                    worker = self._idle.pop() if self._idle and item not in again else _Worker()
                    self._busy.append(worker)
                    worker.begin(function, item, limit)
                for worker in self._ready():
                    self._busy.remove(worker)
                    item = worker.item
                    result = worker.end()
                    exited = isinstance(result, Lost)
                    if exited or spoils(result):
                        worker.stop()
                    else:
                        self._idle.append(worker)
                    if exited and not worker.late and item not in again:
                        # What ran before in this process may be the cause.
                        again.add(item)
                        todo.append(item)
                    else:
                        yield item, result
        finally:
            for worker in self._busy:
                worker.stop()
            self._busy = []

    def _ready(self) -> list[_Worker]:
        """Wait for workers that have a result, have exited or are out of time."""
        ends = [worker.ends for worker in self._busy if worker.ends is not None]
        readable = wait(
            [worker.pipe for worker in self._busy], max(0.0, min(ends) - time.monotonic()) if ends else None
        )
        return [worker for worker in self._busy if worker.pipe in readable or worker.late]


class _Worker:
    """One process and its current item."""

    def __init__(self) -> None:
        # CUDA does not survive a fork.
        context = multiprocessing.get_context("spawn")
        self.pipe: Connection
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        self.item: Any = None
        self.ends: float | None = None
        self._limit: float | None = None

    def begin(self, function: Callable[[Any], Any], item: Any, limit: float | None) -> None:
        self.item, self._limit = item, limit
        self.ends = None if limit is None else time.monotonic() + limit
        # If the process has exited, reading its result reports it.
        with contextlib.suppress(OSError):
            self.pipe.send((function, item))

    @property
    def late(self) -> bool:
        return self.ends is not None and time.monotonic() >= self.ends

    def end(self) -> Any:
        """The result, or `Lost`."""
        if not self.pipe.poll():
            return Lost(f"was not done after {self._limit:g} s")
        try:
            good, result = self.pipe.recv()
        except (EOFError, OSError):
            self.ends = None
            return Lost("exited")
        self.ends = None
        if not good:
            raise KernelError(f"a check raised, which is a bug in opslot:\n{result}", hint="report it with this text")
        return result

    def stop(self) -> None:
        self.pipe.close()
        self._process.kill()
        self._process.join()


def _serve(pipe: Connection) -> None:
    """Run calls from the pipe until its other end closes."""
    # Ctrl-C reaches all processes; the parent ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        try:
            function, item = pipe.recv()
        except EOFError:
            return
        try:
            answer = True, function(item)
        except Exception:
            answer = False, traceback.format_exc()
        pipe.send(answer)
