"""From a patch and the installed Transformers to a module file, through the cache."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from opslot._base.errors import PatchError
from opslot._base.lazy import provider
from opslot.patchgen.cache import cache_homes, locked, prune, read_sealed, touch, write_sealed
from opslot.patchgen.config import PatchConfig
from opslot.patchgen.names import is_elsewhere, modeling_module
from opslot.patchgen.source import Release, installed_release

GENERATED_PACKAGE = "opslot.generated"
_LONGEST_NAME = 160


class NoPatchError(PatchError):
    """An architecture has no patch."""


REGISTERED_PATCHES: dict[str, PatchConfig] = {}


def register_patch(arch: str, patch: PatchConfig, *, replace: bool = False) -> None:
    """Extend what is discovered in an architecture, for this process, as its `patch.py` would.

    Raises:
        PatchError: the architecture is registered with another patch (unless `replace`), or its generated module is
            already imported.
    """
    if not arch.isidentifier():
        raise PatchError(
            f"{arch!r} is not the name of an architecture", hint="use a Python identifier, such as qwen3_moe"
        )
    known = REGISTERED_PATCHES.get(arch)
    if known is not None and known.digest == patch.digest:
        return
    if known is not None and not replace:
        raise PatchError(f"{arch} is registered with another patch", hint="pass replace=True to replace it")
    if f"{GENERATED_PACKAGE}.{arch}" in sys.modules:
        raise PatchError(f"{GENERATED_PACKAGE}.{arch} is already imported", hint="register the patch before the import")
    REGISTERED_PATCHES[arch] = patch


def find_patch(arch: str, release: Release | None = None) -> PatchConfig | None:
    """The patch of an architecture: what is discovered in it, and the registered patch; None for neither.

    Args:
        arch: architecture, the folder's name under `transformers/models`.
        release: the Transformers release; the installed one by default.
    """
    return provider("patches").find_patch(arch, release or installed_release())


def known_archs() -> list[str]:
    """Architectures that are supported or registered, sorted."""
    return provider("patches").architectures()


def require_patch(arch: str, release: Release | None = None) -> PatchConfig:
    """As `find_patch`; an unknown architecture raises NoPatchError, which names the known ones."""
    patch = find_patch(arch, release)
    if patch is None:
        raise _no_patch(arch)
    return patch


def _no_patch(arch: str) -> NoPatchError:
    return NoPatchError(f"no patch for {arch!r}", hint=f"there are patches for {', '.join(known_archs())}")


def materialize(arch: str, patch: PatchConfig | None = None, release: Release | None = None) -> Path:
    """The file of an architecture's generated module, generated now unless it is in the cache.

    Args:
        arch: architecture, the folder's name under `transformers/models`, or `architecture_from` of another module's.
        patch: the patch; the architecture's own by default.
        release: the Transformers release; the installed one by default.

    Returns:
        Path of a file that ends in `models/<arch>/modeling_<arch>.py`, or in the patch's own `target_file`; of a module
        outside Transformers in `modules/<arch>/<module>.py`.
    """
    release = release or installed_release()
    # The finder's digest names its entry, so that a process that finds the entry need not find the patch.
    key = cache_key(patch, release) if patch is not None else _finder_key(arch, release)
    # Transformers reads an architecture's name from the path of a file below `models`.
    folder = "modules" if is_elsewhere(arch) else "models"
    name = f"{modeling_module(arch).rpartition('.')[2]}.py"
    # File systems have a limit of 255 bytes.
    digest = hashlib.sha256(arch.encode()).hexdigest()[:16]
    short = arch if len(arch) <= _LONGEST_NAME else f"{arch[:_LONGEST_NAME]}-{digest}"
    relative = Path("generated", short, key, folder, short, patch.target_file if patch is not None else name)
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
    prune(path.parents[4])
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


def _finder_key(arch: str, release: Release) -> str:
    digest = provider("patches").digest(arch, release)
    if digest is None:
        raise _no_patch(arch)
    return _key(release, [digest])


def _key(release: Release, parts: list[str]) -> str:
    return f"{release.version}-{hashlib.sha256(' '.join([engine_digest(), *parts]).encode()).hexdigest()[:16]}"


@lru_cache(maxsize=1)
def engine_digest() -> str:
    """Hash of this package's own code, so that a new version never uses an old one's output."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
