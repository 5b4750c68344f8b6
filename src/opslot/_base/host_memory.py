"""Memory of the host that a process has freed, kept for its next allocations."""

from __future__ import annotations

import contextlib
import ctypes

# Names in malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MOST_KEPT = 1 << 28
# The highest threshold that older releases of glibc accept.
_OLDER_MOST = 1 << 25


def keep_freed_memory() -> None:
    """Let this process keep up to 256 MiB of freed memory; does nothing without glibc.

    By default glibc returns large arrays, such as pixel values, to the operating system, which clears the pages of the
    next ones.
    """
    # Not on Windows (TypeError, OSError), macOS or musl.
    with contextlib.suppress(AttributeError, OSError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt
        if not mallopt(_M_MMAP_THRESHOLD, _MOST_KEPT):
            mallopt(_M_MMAP_THRESHOLD, _OLDER_MOST)
        mallopt(_M_TRIM_THRESHOLD, _MOST_KEPT)
