"""Environment variables set by a launcher such as torchrun, and exiting with the launcher."""

from __future__ import annotations

import functools
import os
import sys
import threading
import time

from opslot._base.errors import ConfigError

_TORCHRUN = (
    "start the run with torchrun, which sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, "
    "or unset those that are left over"
)


def launched_world_size() -> int:
    """Processes of this run, WORLD_SIZE; 1 without a launcher.

    Raises:
        ConfigError: WORLD_SIZE or RANK is not a number, or RANK is not below WORLD_SIZE.
    """
    world, rank = _number("WORLD_SIZE", 1), _number("RANK", 0)
    if world < 1 or not 0 <= rank < world:
        size = os.environ.get("WORLD_SIZE") or "not set"
        raise ConfigError(f"the environment has RANK={rank}, but WORLD_SIZE is {size}", hint=_TORCHRUN)
    return world


def launched_rank() -> int:
    """Number of this process, RANK; 0 without a launcher."""
    return _number("RANK", 0)


def launched_local_world_size() -> int:
    """Processes of this run on this machine, LOCAL_WORLD_SIZE; all of them where the launcher does not set it."""
    return max(_number("LOCAL_WORLD_SIZE", launched_world_size()), 1)


def is_first_local_rank() -> bool:
    """Whether this is the first process of this run on its machine."""
    return (os.environ.get("LOCAL_RANK") or os.environ.get("RANK") or "0") == "0"


def launched_with_rendezvous() -> bool:
    """Whether the environment has all variables that a process group needs; a single process needs none.

    Raises:
        ConfigError: WORLD_SIZE is above 1 and a variable is missing.
    """
    lacking = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    world = launched_world_size()
    if world > 1 and lacking:
        raise ConfigError(
            f"the environment has WORLD_SIZE={world}, but {' and '.join(lacking)} "
            f"{'is' if len(lacking) == 1 else 'are'} not set",
            hint=_TORCHRUN,
        )
    if not lacking:
        _number("MASTER_PORT", 0)
    return not lacking


def launched_by_torchrun() -> bool:
    """Whether this process was started by torchrun, which then also hosts the store."""
    return "TORCHELASTIC_RUN_ID" in os.environ


_launcher: int | None = None


def killed_launcher() -> str | None:
    """A message where torchrun, which `exit_with_launcher` watches, was killed."""
    if _launcher is None or os.getppid() == _launcher:
        return None
    return f"torchrun (process {_launcher}) was killed"


@functools.cache
def exit_with_launcher() -> None:
    """Exit when torchrun, the parent process, was killed, since it then cannot terminate its ranks.

    A thread watches for this, because the main thread may wait in a collective or for torchrun's store. Does nothing
    without torchrun: a script may start ranks in the background and exit.
    """
    if not launched_by_torchrun():
        return
    global _launcher
    _launcher = os.getppid()

    def watch() -> None:
        while (message := killed_launcher()) is None:
            time.sleep(0.5)
        rank = os.environ.get("RANK", "0")
        sys.stdout.flush()
        print(f"opslot: rank {rank} stops: {message}", file=sys.stderr, flush=True)
        os._exit(1)

    threading.Thread(target=watch, name="opslot-launcher", daemon=True).start()


def _number(name: str, default: int) -> int:
    value = os.environ.get(name) or str(default)
    try:
        return int(value)
    except ValueError:
        raise ConfigError(f"the environment has {name}={value!r}, which is not a number", hint=_TORCHRUN) from None
