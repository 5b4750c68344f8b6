"""Imports `opslot.generated.<arch>` from the file that `materialize` returns."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from types import CodeType, ModuleType

from opslot.patchgen.materialization import GENERATED_PACKAGE, NoPatchError, known_archs, materialize
from opslot.patchgen.names import modeling_module


class _SourceLoader(SourceFileLoader):
    """Compiles the source and reads no bytecode: a `__pycache__` in a cache directory is never run."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module, and let it log as its original, whose level users set with Transformers' verbosity."""
        super().exec_module(module)
        names = vars(module)
        found = names.get("logger")
        if isinstance(found, logging.Logger) and found.name == module.__name__:
            names["logger"] = logging.getLogger(modeling_module(module.__name__.rpartition(".")[2]))


class GeneratedFinder(MetaPathFinder):
    """Finds modules directly below `opslot.generated`, and nothing else."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, arch = fullname.rpartition(".")
        if package != GENERATED_PACKAGE:
            return None
        try:
            file = str(materialize(arch))
        except NoPatchError:
            raise ModuleNotFoundError(
                f"No module named {fullname!r}: no patch for {arch!r}; there are patches for"
                f" {', '.join(known_archs())}, and `opslot.patchgen.register_patch` adds one",
                name=fullname,
            ) from None
        return spec_from_file_location(fullname, file, loader=_SourceLoader(fullname, file))


def install() -> None:
    """Put the finder on `sys.meta_path`, once."""
    if not any(isinstance(finder, GeneratedFinder) for finder in sys.meta_path):
        sys.meta_path.append(GeneratedFinder())
