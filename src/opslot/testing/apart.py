"""Checks in processes beside this one: most of a check's time is compiling its kernel for each shape, on the host."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from typing import Any, TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_MOST_WORKERS = 8


def workers_for(count: int, on_gpu: bool) -> int:
    """As many processes as help with `count` checks: none where the device is the host itself."""
    return min(_MOST_WORKERS, os.cpu_count() or 1, count) if on_gpu else 0


def run_apart(
    function: Callable[[_Item], _Result], items: Sequence[_Item], workers: int, spoils: Callable[[_Result], bool]
) -> tuple[dict[_Item, _Result], list[_Item]]:
    """Call `function` on each item in `workers` processes.

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
        alone, gone = _in_processes(function, [item], 1, spoils)
        results |= alone
        died += gone
    return results, died


def spoils_device(message: str) -> bool:
    """Whether the failure that a message tells of leaves nothing usable for others in the same process."""
    return "CUDA error" in message


def _in_processes(
    function: Callable[[Any], Any], items: Sequence[Any], workers: int, spoils: Callable[[Any], bool]
) -> tuple[dict[Any, Any], list[Any]]:
    """Results, and items whose process died; those in neither fell to a process that an earlier one had spoiled."""
    results: dict[Any, Any] = {}
    lost = []
    # CUDA does not survive a fork.
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = {item: pool.submit(_in_worker, function, item, spoils) for item in items}
        for item, future in futures.items():
            try:
                results[item] = future.result()
            except BrokenExecutor:
                lost.append(item)
            except _Spoiled:
                pass
    return results, lost


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
