"""Collects the forms of all ops: `*forms.py` of folders in `opslot/ops`, and those that other packages register.

Forms are read as files, without importing their ops: generating a module needs neither torch nor Transformers.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from types import ModuleType

from opslot._base.errors import ConfigError
from opslot.models.discovery.sequences import find_unsplit_sequences
from opslot.patchgen.forms import Form

OPS_PACKAGE = "opslot.ops"
ENTRY_POINT_GROUP = "opslot.forms"

_registered: list[tuple[str, Form]] = []


def register_forms(forms: Iterable[Form], *, digest: str) -> None:
    """Add forms for this process. `digest` has to change whenever they do: it is part of the generated modules' key."""
    _registered.extend((digest, form) for form in forms)


def all_forms() -> list[Form]:
    """Every form: those of opslot's ops in the order of the ops' names, then those of other packages."""
    return [
        find_unsplit_sequences,
        *(form for module in _modules() for form in module.FORMS),
        *(form for _, form in _registered),
    ]


def forms_digest() -> str:
    """Hash of all forms and of the engine that applies them."""
    digest = hashlib.sha256()
    files = [*sorted(Path(__file__).parent.glob("*.py")), *(Path(str(module.__file__)) for module in _modules())]
    for file in files:
        digest.update(_content(file))
    for name, _ in _registered:
        digest.update(name.encode())
    return digest.hexdigest()


@lru_cache(maxsize=128)
def _content(file: Path) -> bytes:
    return file.read_bytes()


@lru_cache(maxsize=1)
def _modules() -> tuple[ModuleType, ...]:
    spec = importlib.util.find_spec(OPS_PACKAGE)
    assert spec is not None
    folders = [Path(place) for place in spec.submodule_search_locations or ()]
    files = {f"{file.parent.name}.{file.stem}": file for folder in folders for file in folder.glob("*/*forms.py")}
    own = [_load(f"{OPS_PACKAGE}.{name}", file) for name, file in sorted(files.items())]
    return (*own, *(_of_entry_point(point) for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)))


def _load(name: str, file: Path) -> ModuleType:
    """The module of that name from its file, without importing the package around it."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def _of_entry_point(point: importlib.metadata.EntryPoint) -> ModuleType:
    module = point.load()
    if not isinstance(module, ModuleType) or not hasattr(module, "FORMS"):
        raise ConfigError(
            f"entry point {point.name!r} of group {ENTRY_POINT_GROUP} is not a module of forms",
            found=repr(module),
            hint="let it name a module with a tuple FORMS",
        )
    return module
