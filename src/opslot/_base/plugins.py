"""Entry points of other packages."""

from __future__ import annotations

import importlib.metadata
from types import ModuleType
from typing import Any

from opslot._base.logging import get_logger

logger = get_logger(__name__)


def load_entry_points(group: str, *arguments: Any) -> None:
    """Load every entry point of `group`: a module registers on import, a function is called with `arguments`."""
    for point in importlib.metadata.entry_points(group=group):
        try:
            loaded = point.load()
            if callable(loaded):
                loaded(*arguments)
            elif not isinstance(loaded, ModuleType):
                raise TypeError(f"expected a function or a module, found {loaded!r}")
        except (Exception, SystemExit) as error:
            # A broken plug-in of another package must not stop training, but has to be noticed.
            logger.warning("entry point %r of %s failed: %s: %s", point.value, group, type(error).__name__, error)
