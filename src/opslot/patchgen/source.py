"""Where a Transformers release is on disk, and the modules that are read of it and of others."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass, field
from pathlib import Path

from opslot._base.errors import PatchError
from opslot.patchgen.names import PACKAGE
from opslot.patchgen.own_code import read_module
from opslot.patchgen.upstream import UpstreamModule


@dataclass(frozen=True)
class Release:
    """One Transformers release; `root` is the directory of its `transformers` package."""

    version: str
    root: Path
    _modules: dict[str, UpstreamModule] = field(default_factory=dict, repr=False, compare=False)

    def path(self, module: str) -> Path:
        """File of a module below `transformers`."""
        package, *rest = module.split(".")
        if package != PACKAGE:
            raise PatchError(f"{module} is not a module of {PACKAGE}", hint=f"name one that starts with {PACKAGE}.")
        path = self.root.joinpath(*rest)
        return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")

    def module(self, name: str) -> UpstreamModule:
        """The module of that dotted name; those of Transformers are read once.

        Raises:
            PatchError: the release has no such module, or a module outside Transformers is not imported or has no
                source.
        """
        if name not in self._modules and name.partition(".")[0] != PACKAGE:
            self._modules[name] = read_module(name, self.version, self.module)
        if name not in self._modules:
            path = self.path(name)
            try:
                text = path.read_text(encoding="utf-8")
            except FileNotFoundError:
                raise PatchError(
                    f"{PACKAGE} {self.version} has no module {name}",
                    found=f"no file {path}",
                    hint="use a release that has it",
                ) from None
            package = name if path.name == "__init__.py" else name.rpartition(".")[0]
            self._modules[name] = UpstreamModule(name, self.version, text, package)
        return self._modules[name]


def installed_release() -> Release:
    """The release that `import transformers` would load, found without importing it."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise PatchError("transformers is not installed", hint="install it with `pip install 'transformers>=5.9'`")
    root = Path(spec.origin).parent
    return Release(read_version(root), root)


def read_version(root: Path) -> str:
    """`__version__` of the package at `root`, read from its text."""
    text = (root / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r"^__version__ = [\"']([^\"']+)[\"']", text, re.MULTILINE)
    if found is None:
        raise PatchError(
            f"{root / '__init__.py'} names no __version__", hint="give the folder of a Transformers release"
        )
    return found.group(1)
