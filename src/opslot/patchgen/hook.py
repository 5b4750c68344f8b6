"""Imports `opslot.generated.<arch>` from the file that `materialize` names."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from types import ModuleType

from opslot.patchgen.materialization import GENERATED_PACKAGE, find_patch, known_archs, materialize


class GeneratedFinder(MetaPathFinder):
    """Finds modules directly below `opslot.generated`, and nothing else."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, arch = fullname.rpartition(".")
        if package != GENERATED_PACKAGE:
            return None
        patch = find_patch(arch)
        if patch is None:
            raise ModuleNotFoundError(
                f"No module named {fullname!r}: no patch for {arch!r}; there are patches for"
                f" {', '.join(known_archs())}, and `opslot.patchgen.register_patch` adds one",
                name=fullname,
            )
        return spec_from_file_location(fullname, materialize(arch, patch))


def install() -> None:
    """Put the finder on `sys.meta_path`, once."""
    if not any(isinstance(finder, GeneratedFinder) for finder in sys.meta_path):
        sys.meta_path.append(GeneratedFinder())
