"""One run at a time writes to an output folder."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from pathlib import Path

from opslot._base.errors import ConfigError
from opslot._base.logging import get_logger

logger = get_logger(__name__)

LOCK_FILE = ".lock"
_UNSUPPORTED = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS}
# POSIX locks do not exclude another lock of the same process.
_held_here: set[Path] = set()


class OutputLock:
    """Exclusive use of an output folder, from `acquire` to `release` or to the end of the process, even a kill.

    A POSIX lock on `<folder>/.lock`, so it also excludes runs on other machines of a shared file system, and
    processes forked by the run (data workers) do not keep it. The file records pid and host for the error message.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOCK_FILE
        self._handle: int | None = None

    def require_free(self) -> None:
        """Raise if another run holds the lock; writes nothing.

        Raises:
            ConfigError: names pid and host of the other run.
        """
        if self.path.resolve() in _held_here:
            raise self._in_use()
        try:
            handle = os.open(self.path, os.O_RDWR)
        except OSError:
            return
        try:
            self._lock(handle)
        finally:
            os.close(handle)

    def acquire(self) -> None:
        """Create the folder and take the lock.

        Raises:
            ConfigError: see `require_free`.
        """
        if self.path.resolve() in _held_here:
            raise self._in_use()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                self._lock(handle)
                # A run that ended in between has removed the file that was opened.
                if os.path.exists(self.path) and os.path.samestat(os.fstat(handle), os.stat(self.path)):
                    break
            except BaseException:
                os.close(handle)
                raise
            os.close(handle)
        record = {"pid": os.getpid(), "host": socket.gethostname(), "started": time.strftime("%Y-%m-%d %H:%M:%S")}
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps(record).encode(), 0)
        self._handle = handle
        _held_here.add(self.path.resolve())

    def release(self) -> None:
        """Give the folder back and remove the file."""
        if self._handle is not None:
            self.path.unlink(missing_ok=True)
            os.close(self._handle)
            self._handle = None
            _held_here.discard(self.path.resolve())

    def _lock(self, handle: int) -> None:
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _UNSUPPORTED:
                logger.warning(
                    "%s cannot be locked (%s), so a second run that writes there is not detected",
                    self.path.parent,
                    error.strerror,
                )
                return
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
            raise self._in_use() from error

    def _in_use(self) -> ConfigError:
        try:
            record = json.loads(self.path.read_text())
            owner = f"pid {record['pid']} on {record['host']}, started {record['started']}"
        except (OSError, ValueError, KeyError, TypeError):
            owner = f"its pid could not be read from {self.path}"
        return ConfigError(
            f"another run writes to train.output_dir={self.path.parent}",
            found=owner,
            hint="wait for it to end, stop it, or set another train.output_dir",
        )
