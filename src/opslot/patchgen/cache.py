"""The cache of generated modules: checked when read, written atomically by one process, pruned of unused entries."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from opslot._base.files import write_text
from opslot._base.logging import get_logger
from opslot.patchgen.names import is_elsewhere

logger = get_logger(__name__)

_SEAL = "# opslot cache, sha256 of all above: "
_UNUSED_SECONDS = 30 * 24 * 3600
_LOCK_FILE = ".lock"
# Generating takes seconds. A process that waits for longer does it itself.
_LOCK_SECONDS = 60.0


def cache_root() -> Path:
    """`$OPSLOT_CACHE`, else `$XDG_CACHE_HOME/opslot`, else `~/.cache/opslot`."""
    if chosen := os.environ.get("OPSLOT_CACHE"):
        return Path(chosen).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache").absolute() / "opslot"
    except RuntimeError:
        return private_root()


def cache_homes() -> list[Path]:
    """Where entries are looked up; new ones go to the last: a private one if the first is not writable or trusted."""
    root = cache_root()
    try:
        root.mkdir(mode=0o755, parents=True, exist_ok=True)
    except OSError:
        return [root, private_root()]
    if not is_trusted(root):
        _warn_of_untrusted(root)
        return [private_root()]
    return [root] if os.access(root, os.W_OK) else [root, private_root()]


def is_trusted(path: Path) -> bool:
    """Whether only this user and root can write there: what is in the cache is run as code.

    A group may write where it is the owner's private one, as a umask of 002 leaves it.
    """
    if not hasattr(os, "getuid"):
        return True
    try:
        found = path.stat()
    except OSError:
        return False
    private_group = found.st_gid == found.st_uid
    writable = found.st_mode & (0o002 if private_group else 0o022)
    return found.st_uid in (0, os.getuid()) and not writable


@lru_cache(maxsize=8)
def _warn_of_untrusted(root: Path) -> None:
    logger.warning(
        "the cache %s belongs to another user or others can write to it, so it is not used; "
        "set OPSLOT_CACHE to a directory of your own, or run `chmod go-w` on it",
        root,
    )


def private_root() -> Path:
    """A directory below the system's temporary one that only this user can write; for read-only homes."""
    user = os.getuid() if hasattr(os, "getuid") else os.getpid()
    path = Path(tempfile.gettempdir()) / f"opslot-{user}"
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    owned = not hasattr(os, "getuid") or found.st_uid == os.getuid()
    if stat.S_ISDIR(found.st_mode) and owned and not found.st_mode & 0o022:
        return path
    return Path(tempfile.mkdtemp(prefix="opslot-"))


def read_sealed(path: Path, root: Path) -> str | None:
    """The text that `write_sealed` wrote there; None if there is none, it is damaged, or others can write it.

    Args:
        path: the file.
        root: the cache, which `cache_homes` has checked; the directories between are checked here.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    if not all(is_trusted(part) for part in (path, *path.parents) if part.is_relative_to(root)):
        return None
    body, mark, seal = text.rpartition(_SEAL)
    if not mark or seal.strip() != hashlib.sha256(body.encode()).hexdigest():
        return None
    return body


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Inside, this process has the lock of `folder`; the system releases that of a process that was killed.

    Where the file system has no locks, and if another process keeps the lock for a minute, the block runs without it:
    then several processes may write the same entry, which is only slower.
    """
    handle = _try_to_lock(folder)
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)


def _try_to_lock(folder: Path) -> int | None:
    """A descriptor that has the lock of `folder` until it is closed; None without the lock."""
    handle = None
    try:
        # Windows has no such module.
        import fcntl

        _make_folders(folder / _LOCK_FILE)
        handle = os.open(folder / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return handle
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
    except (ImportError, OSError):
        if handle is not None:
            os.close(handle)
        return None


def _make_folders(file: Path) -> None:
    """Make the folders around a file so that `read_sealed` trusts them, whatever the umask."""
    for parent in reversed(file.parents):
        with contextlib.suppress(FileExistsError):
            parent.mkdir(mode=0o755)


def write_sealed(path: Path, text: str) -> None:
    """Write `text` and its hash. A reader sees the old file or the new one, never a part."""
    _make_folders(path)
    seal = f"{_SEAL}{hashlib.sha256(text.encode()).hexdigest()}\n"
    write_text(path, text + seal)
    path.chmod(0o644)


def touch(entry: Path) -> None:
    """Note that a cache entry was used, at most once a day."""
    with contextlib.suppress(OSError):
        if time.time() - entry.stat().st_mtime > 24 * 3600:
            os.utime(entry)


def prune(root: Path) -> None:
    """Remove entries that were not used this month, except the last used one of each architecture of Transformers.

    Each version of a checkpoint's own code is another architecture, so none of their entries is kept. A process whose
    entry is removed keeps running; the next one generates the entry again.
    """
    # Another process may remove the same entries.
    with contextlib.suppress(OSError):
        for folder in filter(Path.is_dir, root.iterdir()):
            used = {entry: entry.stat().st_mtime for entry in folder.iterdir() if entry.name != _LOCK_FILE}
            unused = sorted(used, key=used.__getitem__)
            for entry in unused if is_elsewhere(folder.name) else unused[:-1]:
                if time.time() - used[entry] > _UNUSED_SECONDS:
                    shutil.rmtree(entry, ignore_errors=True)
