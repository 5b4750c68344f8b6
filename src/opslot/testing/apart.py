"""Checks in processes beside this one: most of a check's time is compiling its kernel for each shape, on the host."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from typing import Any, TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_MOST_WORKERS = 8


def most_workers() -> int:
    """As many processes as help on a GPU."""
    return min(_MOST_WORKERS, os.cpu_count() or 1)


def workers_for(count: int, on_gpu: bool) -> int:
    """As many processes as help with `count` checks: none where the device is the host itself."""
    return min(most_workers(), count) if on_gpu else 0


class Processes:
    """Processes for one batch of checks after another: starting one takes seconds, which importing needs.

    Args:
        count: of processes, started when there is work and replaced when one of them is beyond use.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def submit(self, function: Callable[..., _Result], *arguments: Any) -> Future[_Result]:
        if self._pool is None:
            # CUDA does not survive a fork.
            self._pool = ProcessPoolExecutor(self._count, mp_context=multiprocessing.get_context("spawn"))
        return self._pool.submit(function, *arguments)

    def stop(self) -> None:
        """End the processes; the next work starts new ones."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None


def run_apart(
    function: Callable[[_Item], _Result],
    items: Sequence[_Item],
    workers: Processes,
    spoils: Callable[[_Result], bool],
) -> tuple[dict[_Item, _Result], list[_Item]]:
    """Call `function` on each item in `workers`.

    Args:
        function, spoils: importable by name; `spoils` says of a result that its process can compute nothing more.
        items: hashable, and picklable.

    Returns:
        Results by item, and the items whose process died, each in one of its own at last.
    """
    results, lost = _in_processes(function, items, workers, spoils)
    left = [item for item in items if item not in results and item not in lost]
    if left:
        more, died = run_apart(function, left, workers, spoils)
        results |= more
    else:
        died = []
    for item in lost:
        # One that takes its process down takes others with it.
        with Processes(1) as alone:
            found, gone = _in_processes(function, [item], alone, spoils)
        results |= found
        died += gone
    return results, died


def spoils_device(message: str) -> bool:
    """Whether the failure that a message tells of leaves nothing usable for others in the same process."""
    return "CUDA error" in message


def _in_processes(
    function: Callable[[Any], Any], items: Sequence[Any], workers: Processes, spoils: Callable[[Any], bool]
) -> tuple[dict[Any, Any], list[Any]]:
    """Results, and items whose process died; those in neither fell to a process that an earlier one had spoiled."""
    results: dict[Any, Any] = {}
    lost = []
    futures = {item: _submitted(workers, function, item, spoils) for item in items}
    for item, future in futures.items():
        try:
            results[item] = future.result()
        except BrokenExecutor:
            lost.append(item)
        except _Spoiled:
            pass
    if len(results) < len(items) or any(map(spoils, results.values())):
        workers.stop()
    return results, lost


def _submitted(workers: Processes, *task: Any) -> Future[Any]:
    try:
        return workers.submit(_in_worker, *task)
    except BrokenExecutor as error:
        # A process died of what was submitted before.
        gone: Future[Any] = Future()
        gone.set_exception(error)
        return gone


class _Spoiled(Exception):
    """A check before this one left the process without a usable device."""


_spoiled = False


def _in_worker(function: Callable[[Any], Any], item: Any, spoils: Callable[[Any], bool]) -> Any:
    global _spoiled
    if _spoiled:
        raise _Spoiled
    result = function(item)
    _spoiled = spoils(result)
    return result
