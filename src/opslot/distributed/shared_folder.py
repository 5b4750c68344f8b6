"""Whether the ranks, which may be on several machines, see one folder."""

from __future__ import annotations

import socket
import time
import uuid
from pathlib import Path

from opslot._base.errors import ConfigError
from opslot.distributed.consensus import gather_objects, on_first_rank

# A network file system may show new files this much later.
_SECONDS = 60.0


def require_shared(folder: Path, field: str) -> None:
    """Check that all ranks see what rank 0 writes to `folder`, which exists there. Every rank calls it.

    Args:
        field: of the configuration, which names the folder.

    Raises:
        ConfigError: on every rank, if some do not see it.
    """
    # A new name: a file system may remember for a while that another one was missing.
    file = folder / f".{uuid.uuid4().hex}.shared"
    file = on_first_rank(lambda: _written(file))
    try:
        seen = gather_objects((socket.gethostname(), _appears(file)))
    finally:
        on_first_rank(lambda: file.unlink(missing_ok=True))
    missing = [f"rank {rank} on {host}" for rank, (host, is_seen) in enumerate(seen) if not is_seen]
    if missing:
        raise not_shared(folder, field, f"{', '.join(missing)} cannot see what rank 0 on {seen[0][0]} writes there")


def not_shared(folder: Path, field: str, found: str) -> ConfigError:
    """The error for a folder that is another one on some ranks."""
    return ConfigError(
        f"{field}={folder} is not one folder for all processes",
        found=found,
        hint="set it to a folder that all machines share, by its absolute path",
    )


def _written(file: Path) -> Path:
    file.touch()
    return file


def _appears(file: Path) -> bool:
    deadline = time.monotonic() + _SECONDS
    while not file.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
