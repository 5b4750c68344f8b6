"""When one rank fails, all do, at once, and each says which one failed and why."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Iterator

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from opslot._base.errors import OpslotError, ParallelError
from opslot.distributed._peers import LocalPeers


class OtherRankFailed(ParallelError):
    """This rank failed after another one, whose error is the one to tell."""


_ERROR, _SEEN, _DONE, _LEFT = "error", "seen", "done", "left"
_GRACE_SECONDS = 5.0
_SHOWN_SECONDS = 1.0
# torchrun ends all ranks with the first one that ends, which should be the one that tells why.
_LEAD_SECONDS = 1.0
# Every rank of a group enters as often, so the number keeps one use's keys from the next one's.
_runs: weakref.WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def failing_together(poll_seconds: float = 0.5) -> Iterator[None]:
    """Inside, an exception (or sys.exit) on one rank ends every rank within seconds, whatever collective it waits in.

    The rank that fails first raises its own exception on, and records it for torchrun. The others print it and exit
    with code 1, or, when they have an exception of their own by then, raise OtherRankFailed with the first one. For a
    rank that is killed, one of those left on its machine speaks: a ParallelError that names it. Without an exception,
    ranks leave together. A single process, or one without a process group, is left alone.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    run = next(_runs.setdefault(dist.distributed_c10d._get_default_group(), itertools.count()))
    store = dist.PrefixStore(f"opslot/{run}", _own_connection())
    done = threading.Event()
    peers = LocalPeers(store)
    arguments = (store, peers, done, poll_seconds)
    watcher = threading.Thread(target=_watch, args=arguments, name="opslot-errors", daemon=True)
    watcher.start()
    try:
        yield
        _leave(store, done)
    except (Exception, SystemExit) as error:
        done.set()
        watcher.join()
        # The end of a process breaks the others' collectives a moment before it shows.
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
        time.sleep(_LEAD_SECONDS)
        raise OtherRankFailed(first) from error
    finally:
        done.set()
        watcher.join()
        peers.close()


def _record(error: BaseException) -> None:
    """Leave the error that is being handled, or a user's `error` by its message alone, where torchrun looks for it."""
    # The disk may be what the error is about.
    with contextlib.suppress(OSError):
        if not isinstance(error, OpslotError):
            get_error_handler().record_exception(error)
            return
        try:
            raise type(error)(str(error)) from None
        except OpslotError as told:
            told.__traceback__ = None
            get_error_handler().record_exception(told)


def _own_connection() -> dist.Store:
    """The group's store, through a connection that no rendezvous keeps busy."""
    store = dist.distributed_c10d._get_default_store()
    return store.clone()  # type: ignore[attr-defined]


def _gone(rank: int) -> str:
    return f"rank {rank} is gone without a word (killed, or out of memory)"


def _publish(store: dist.Store, message: str, readers: int) -> str | None:
    """File `message` as the run's and let `readers` ranks read it; None, or the message of the rank that was first."""
    mark = f"{dist.get_rank()} "
    try:
        first = store.compare_set(_ERROR, "", mark + message).decode()
        if not first.startswith(mark):
            store.add(_SEEN, 1)
            return first.partition(" ")[2]
        # The store may live in this process, so it must stay until the others have read the message.
        _await_count(store, _SEEN, readers, _GRACE_SECONDS)
    except dist.DistError:
        # The store went with the rank that kept it; this rank's own error is the best there is to tell.
        return None
    return None


def _leave(store: dist.Store, done: threading.Event) -> None:
    """Wait for the others to get here; rank 0, which may keep the store, goes last."""
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
    """A user's error by its message; a defect with its traceback."""
    if isinstance(error, OpslotError):
        return f"{type(error).__name__}: {error}"
    return "".join(traceback.format_exception(error)).rstrip()


def _watch(store: dist.Store, peers: LocalPeers, done: threading.Event, poll_seconds: float) -> None:
    """End this process when another rank files an error or is gone; its main thread may be in a collective, deaf to
    signals."""
    while not done.wait(poll_seconds):
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
            message = "the rank that keeps the store is gone without a word (killed, or out of memory)"
            if (lost := peers.lost(_SHOWN_SECONDS)) is not None:
                message = _gone(lost)
        if done.is_set():
            return
        sys.stdout.flush()
        print(f"opslot: rank {dist.get_rank()} stops: {message}", file=sys.stderr, flush=True)
        time.sleep(lead)
        os._exit(1)
