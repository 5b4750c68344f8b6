"""A fake upstream release on disk; tests compare the text before and after an edit."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from opslot.patchgen import PatchConfig
from opslot.patchgen.engine import generate
from opslot.patchgen.source import Release

MODULE = "transformers.models.toy.modeling_toy"

MakeRelease = Callable[..., Release]
Rewrite = Callable[[str, PatchConfig], str]


@pytest.fixture
def make_release(tmp_path: Path) -> MakeRelease:
    """Writes a release: the text of `modeling_toy`, and other modules by dotted name."""

    def make(source: str, version: str = "9.0.0", root: Path | None = None, **modules: str) -> Release:
        package = (root or tmp_path / version) / "transformers"
        files = {MODULE: source, "transformers": f'__version__ = "{version}"', **modules}
        for name, text in files.items():
            path = package.joinpath(*name.split(".")[1:])
            path = path / "__init__.py" if name == "transformers" else path.with_suffix(".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text).strip("\n") + "\n")
        return Release(version, package)

    return make


@pytest.fixture
def patch() -> PatchConfig:
    return PatchConfig(MODULE)


@pytest.fixture
def rewrite(make_release: MakeRelease) -> Rewrite:
    """The generated text without its header and docstring."""

    def run(source: str, patch: PatchConfig, **modules: str) -> str:
        text = generate(patch, make_release(source, **modules))
        compile(text, "generated", "exec")
        return text.split('do not edit."""\n', 1)[1].strip("\n") + "\n"

    return run
