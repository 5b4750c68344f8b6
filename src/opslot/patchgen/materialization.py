"""From a patch and the installed Transformers to a module file, through the cache."""

from __future__ import annotations

import hashlib
import importlib
import sys
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Protocol, cast

from opslot._base.errors import PatchError
from opslot._base.plugins import PATCH_FINDERS
from opslot.patchgen.cache import cache_homes, locked, prune, read_sealed, touch, write_sealed
from opslot.patchgen.config import PatchConfig
from opslot.patchgen.source import Release, installed_release

GENERATED_PACKAGE = "opslot.generated"


class NoPatchError(PatchError):
    """An architecture has no patch."""


class PatchFinder(Protocol):
    """Makes patches of architectures that are not registered; a module of `_base.plugins.PATCH_FINDERS` is one."""

    def find_patch(self, arch: str, release: Release) -> PatchConfig | None:
        """The patch of an architecture for a release, or None."""

    def digest(self, arch: str, release: Release) -> str | None:
        """Hash of everything that `find_patch` depends on, computed without finding anything."""

    def architectures(self) -> list[str]:
        """The architectures that are listed: those in commands such as `patchgen --all` and in error messages."""


_registered: dict[str, PatchConfig] = {}


def register_patch(arch: str, patch: PatchConfig, *, replace: bool = False) -> None:
    """Make `opslot.generated.<arch>` come from `patch`, for this process.

    Raises:
        PatchError: the architecture is registered with another patch (unless `replace`), or its generated module is
            already imported.
    """
    if not arch.isidentifier():
        raise PatchError(
            f"{arch!r} is not the name of an architecture", hint="use a Python identifier, such as qwen3_moe"
        )
    check_replaceable(arch, _registered.get(arch), patch, replace)
    _registered[arch] = patch


def check_replaceable(arch: str, known: PatchConfig | None, patch: PatchConfig, replace: bool) -> None:
    """Raise PatchError where `patch` may not replace `known`: without `replace`, or after the module's import."""
    if known is not None and known.digest == patch.digest:
        return
    if known is not None and not replace:
        raise PatchError(f"{arch} is registered with another patch", hint="pass replace=True to replace it")
    if f"{GENERATED_PACKAGE}.{arch}" in sys.modules:
        raise PatchError(f"{GENERATED_PACKAGE}.{arch} is already imported", hint="register the patch before the import")


def _finders() -> list[PatchFinder]:
    return [cast(PatchFinder, importlib.import_module(name)) for name in PATCH_FINDERS]


def find_patch(arch: str, release: Release | None = None) -> PatchConfig | None:
    """The patch of an architecture: the registered one, else the first that a finder has; None for neither.

    Args:
        arch: architecture, the folder's name under `transformers/models`.
        release: the Transformers release; the installed one by default.
    """
    if arch in _registered:
        return _registered[arch]
    release = release or installed_release()
    found = (finder.find_patch(arch, release) for finder in _finders())
    return next((patch for patch in found if patch is not None), None)


def known_archs() -> list[str]:
    """Architectures that are registered or listed by a finder, sorted."""
    return sorted({*_registered, *(arch for finder in _finders() for arch in finder.architectures())})


def require_patch(arch: str, release: Release | None = None) -> PatchConfig:
    """Like `find_patch`, but an unknown architecture raises NoPatchError, which names the known ones."""
    patch = find_patch(arch, release)
    if patch is None:
        raise NoPatchError(f"no patch for {arch!r}", hint=f"there are patches for {', '.join(known_archs())}")
    return patch


def materialize(arch: str, patch: PatchConfig | None = None, release: Release | None = None) -> Path:
    """The file of an architecture's generated module, generated now unless it is in the cache.

    Args:
        arch: architecture, the folder's name under `transformers/models`.
        patch: the patch; the architecture's own by default.
        release: the Transformers release; the installed one by default.

    Returns:
        Path of a file that ends in `models/<arch>/modeling_<arch>.py`, or in the patch's own `target_file`.
    """
    release = release or installed_release()
    patch = patch or _registered.get(arch)
    # A finder's digest names its entry, so that a process that finds the entry need not find the patch.
    key = cache_key(patch, release) if patch is not None else _finders_key(arch, release)
    target = patch.target_file if patch is not None else f"modeling_{arch}.py"
    relative = Path("generated", arch, key, "models", arch, target)
    homes = cache_homes()
    if (cached := _cached(homes, relative)) is not None:
        return cached
    path = homes[-1] / relative
    with locked(path.parents[3]):
        # Another process may have written it since.
        if (cached := _cached(homes, relative)) is not None:
            return cached
        from opslot.patchgen.engine import generate

        text = generate(patch or require_patch(arch, release), release)
        try:
            write_sealed(path, text)
        except OSError as error:
            raise PatchError(
                f"cannot write {path}", found=error.strerror or str(error), hint="set OPSLOT_CACHE to another directory"
            ) from error
    prune(path.parents[3])
    return path


def _cached(homes: Iterable[Path], relative: Path) -> Path | None:
    """The file of an entry in the first of `homes` that has it whole; None where none does."""
    for home in homes:
        if read_sealed(home / relative, home) is not None:
            touch(home / relative.parents[2])
            return home / relative
    return None


def cache_key(patch: PatchConfig, release: Release) -> str:
    """Name of a cache entry: everything that the generated text depends on."""
    parts = [patch.digest, *(release.module(name).digest for name in patch.upstream_modules)]
    return _key(release, parts)


def _finders_key(arch: str, release: Release) -> str:
    digests = [finder.digest(arch, release) for finder in _finders()]
    if not any(digests):
        require_patch(arch, release)
    return _key(release, [digest or "" for digest in digests])


def _key(release: Release, parts: list[str]) -> str:
    return f"{release.version}-{hashlib.sha256(' '.join([engine_digest(), *parts]).encode()).hexdigest()[:16]}"


@lru_cache(maxsize=1)
def engine_digest() -> str:
    """Hash of this package's own code, so that a new version never uses an old one's output."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
