"""Packages whose names are imported when they are used, so that importing the package is quick."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

_PROVIDERS: dict[str, str] = {}


def lazy_names(package: str, modules: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The `__getattr__` and `__dir__` of a package.

    Args:
        modules: by module, absolute or relative to the package, the names that it has, separated by spaces.
    """
    homes = {name: module for module, names in modules.items() for name in names.split()}

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(homes[name], package), name)

    def names() -> list[str]:
        return sorted([*vars(importlib.import_module(package)), *homes])

    return get, names


def register_provider(service: str, module: str) -> None:
    """Name the module that provides `service` to the packages below it, which cannot import it."""
    _PROVIDERS[service] = module


def provider(service: str) -> ModuleType:
    """The module registered for `service`, imported now."""
    return importlib.import_module(_PROVIDERS[service])
