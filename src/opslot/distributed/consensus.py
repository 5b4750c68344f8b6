"""All ranks agree, or all fail together.

- `gather_objects` and `sum_over_ranks` give every rank the same values;
- `wait_for_ranks` is a barrier without a time limit;
- `on_all_ranks` and `on_first_rank` run a function that may fail on some ranks: then it fails on all, with one error;
- `fail_together` covers everything else: an exception or a kill on one rank ends the others within seconds, also those
  that wait in a collective.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from opslot._base.errors import OpslotError, OtherRankFailed, ParallelError
from opslot._base.launcher import killed_launcher
from opslot.distributed._peers import LocalPeers

T = TypeVar("T")
_FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class RankError(ParallelError):
    """An unexpected error of one rank, raised on all."""


def is_first_rank() -> bool:
    """Whether this process is rank 0 or the only process."""
    return not dist.is_initialized() or dist.get_rank() == 0


def sum_over_ranks(*values: float) -> list[float]:
    """The sum of each number over all ranks; the numbers themselves in a single process."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return list(values)
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    return total.tolist()


def gather_objects(value: T, group: ProcessGroup | None = None) -> list[T]:
    """The value of every rank, in rank order; values are pickled."""
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def on_all_ranks(function: Callable[[], T], group: ProcessGroup | None = None) -> list[T]:
    """Call `function` on every rank of `group` and return the results in rank order.

    Raises:
        OpslotError: on every rank, the error of the lowest rank on which `function` failed, of the same class and with
            the rank in its message. Any other error becomes a RankError. A single process raises the error itself.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return [function()]
    result, error = None, None
    try:
        result = function()
    except Exception as problem:
        error = problem
    kind = type(error) if isinstance(error, OpslotError) else RankError
    failure = None if error is None else (kind, root_cause(error))
    answers = gather_objects((result, failure), group)
    for rank, (_, found) in enumerate(answers):
        if found is not None:
            kind, message = found
            raise kind(f"rank {rank}: {message}") from error
    return [value for value, _ in answers]  # type: ignore[misc]


def on_first_rank(function: Callable[[], T], group: ProcessGroup | None = None) -> T:
    """Call `function` on rank 0 while the others wait, and return its result, or raise its error, on every rank."""
    return on_all_ranks(lambda: function() if is_first_rank() else None, group)[0]  # type: ignore[return-value]


def wait_for_ranks() -> None:
    """Wait for all ranks without the time limit of a collective: they may have downloaded for hours.

    Inside `fail_together`, a rank that fails meanwhile ends the others.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    number = next(_waits.setdefault(dist.distributed_c10d._get_default_group(), itertools.count()))
    store = dist.PrefixStore(f"opslot/wait/{number}", _own_connection())
    store.add(_SEEN, 1)
    _await_count(store, _SEEN, dist.get_world_size())


def root_cause(error: BaseException) -> str:
    """The message of `error`; for an error with those of several ranks, the first one with its rank."""
    failures = getattr(error, "failures", None)
    if failures:
        rank, first = next(iter(sorted(failures.items())))
        cause = root_cause(first[0] if isinstance(first, tuple) else first)
        return f"rank {rank}: {cause}" if dist.is_initialized() else cause
    before = error.__context__
    if type(error) is RuntimeError and isinstance(before, OSError) and before.errno in _FULL_DISK:
        # torch's zip writer raises an error of its own while it handles this one.
        return str(before)
    return str(error) or type(error).__name__


_ERROR, _SEEN, _REPORTED, _DONE, _LEFT = "error", "seen", "reported", "done", "left"
_POLL_SECONDS = 0.5
_GRACE_SECONDS = 5.0
_SHOWN_SECONDS = 1.0
# torchrun ends all ranks as soon as one exits, so the rank with the error message should exit first.
_LEAD_SECONDS = 1.0
# Number the uses of a group's store, so that their keys differ.
_waits: weakref.WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = weakref.WeakKeyDictionary()
_runs: weakref.WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def fail_together() -> Iterator[None]:
    """Inside, an exception (or sys.exit) on one rank ends every rank within seconds, whatever collective it waits in.

    The rank that fails first re-raises its exception and records it for torchrun. The others print it and exit with
    code 1, or raise OtherRankFailed with it if they have raised an exception themselves. If a rank is killed, one of
    the remaining ranks of its machine raises a ParallelError that names it. Without an exception, all ranks leave
    together. Does nothing in a single process.

    A KeyboardInterrupt stays one on its rank, and ends the others like an exception.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    run = next(_runs.setdefault(dist.distributed_c10d._get_default_group(), itertools.count()))
    store = dist.PrefixStore(f"opslot/{run}", _own_connection())
    done = threading.Event()
    peers = LocalPeers(store)
    watcher = threading.Thread(target=_watch, args=(store, peers, done), name="opslot-errors", daemon=True)
    watcher.start()
    try:
        yield
        _leave(store, done)
    except (Exception, SystemExit) as error:
        done.set()
        watcher.join()
        # Collectives of the others break a moment before the process is seen to have ended.
        lost = peers.lost(_SHOWN_SECONDS)
        own = f"rank {dist.get_rank()} failed: {_describe(error)}" if lost is None else _gone(lost)
        first = _publish(store, own, readers=dist.get_world_size() - (1 if lost is None else 2))
        if first is None:
            if lost is None:
                _record(error)
                raise
            gone = ParallelError(own)
            _record(gone)
            raise gone from error
        if not _is_reported(store):
            # That rank has ended too: torchrun ends those of a machine where one was killed.
            _print(first)
        time.sleep(_LEAD_SECONDS)
        raise OtherRankFailed(first) from error
    except KeyboardInterrupt as stop:
        done.set()
        watcher.join()
        # A signal may reach one rank only.
        message = f"rank {dist.get_rank()} was stopped by {stop if stop.args else 'SIGINT'}"
        _publish(store, message, readers=dist.get_world_size() - 1)
        raise
    finally:
        done.set()
        watcher.join()
        peers.close()


def _record(error: BaseException) -> None:
    """Write the error being handled where torchrun looks for it; an OpslotError without its traceback."""
    # The error may be about a full disk.
    with contextlib.suppress(OSError):
        if not isinstance(error, OpslotError):
            get_error_handler().record_exception(error)
            return
        try:
            raise type(error)(str(error)) from None
        except OpslotError as plain:
            plain.__traceback__ = None
            get_error_handler().record_exception(plain)


def _own_connection() -> dist.Store:
    """The group's store on a separate connection, so that no rendezvous blocks it."""
    store = dist.distributed_c10d._get_default_store()
    return store.clone()  # type: ignore[attr-defined]


def _gone(rank: int) -> str:
    return f"rank {rank} exited without an error message (killed or out of memory)"


def _publish(store: dist.Store, message: str, readers: int) -> str | None:
    """Store `message` unless another rank has stored one, and wait until `readers` ranks have read it.

    Returns:
        None, or the message of the rank that was first.
    """
    mark = f"{dist.get_rank()} "
    try:
        first = store.compare_set(_ERROR, "", mark + message).decode()
        if not first.startswith(mark):
            store.add(_SEEN, 1)
            return first.partition(" ")[2]
        # This process may host the store, so it waits until the others have read the message.
        _await_count(store, _SEEN, readers, _GRACE_SECONDS)
        store.add(_REPORTED, 1)
    except dist.DistError:
        # The rank that hosted the store is gone, so this rank reports its own error.
        return None
    return None


def _is_reported(store: dist.Store) -> bool:
    """Wait for the rank whose error was first to report it; it waits longer for ranks of a machine that is lost."""
    with contextlib.suppress(dist.DistError):
        _await_count(store, _REPORTED, 1, _GRACE_SECONDS)
        return store.add(_REPORTED, 0) > 0
    return False


def _leave(store: dist.Store, done: threading.Event) -> None:
    """Wait for all ranks to get here; rank 0, which may host the store, leaves last."""
    world = dist.get_world_size()
    store.add(_DONE, 1)
    _await_count(store, _DONE, world)
    done.set()
    store.add(_LEFT, 1)
    if dist.get_rank() == 0:
        _await_count(store, _LEFT, world, _GRACE_SECONDS)


def _await_count(store: dist.Store, key: str, count: int, seconds: float = float("inf")) -> None:
    deadline = time.monotonic() + seconds
    while store.add(key, 0) < count and time.monotonic() < deadline:
        time.sleep(0.05)


def _describe(error: BaseException) -> str:
    """The message of an OpslotError; any other error with its traceback."""
    if isinstance(error, OpslotError):
        return f"{type(error).__name__}: {error}"
    return "".join(traceback.format_exception(error)).rstrip()


def _print(message: str) -> None:
    sys.stdout.flush()
    print(f"opslot: rank {dist.get_rank()} stops: {message}", file=sys.stderr, flush=True)


def _watch(store: dist.Store, peers: LocalPeers, done: threading.Event) -> None:
    """End this process when another rank has reported an error or has exited; the main thread may be stuck in a
    collective."""
    while not done.wait(_POLL_SECONDS):
        lost, lead = peers.lost(), 0.0
        try:
            if store.check([_ERROR]):
                message = store.get(_ERROR).decode().partition(" ")[2]
                store.add(_SEEN, 1)
                lead = _LEAD_SECONDS
            elif lost is not None and store.add(_DONE, 0) < dist.get_world_size():
                message = _publish(store, _gone(lost), readers=dist.get_world_size() - 2) or _gone(lost)
            else:
                continue
        except dist.DistError:
            message = "the rank that hosts the store exited without an error message (killed or out of memory)"
            if (lost := peers.lost(_SHOWN_SECONDS)) is not None:
                message = _gone(lost)
        if done.is_set():
            return
        # Another rank may have noticed first that torchrun was killed, and exited.
        message = killed_launcher() or message
        _print(message)
        time.sleep(lead)
        os._exit(1)
