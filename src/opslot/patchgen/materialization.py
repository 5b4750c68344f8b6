"""From a patch and the installed Transformers to a module file, through the cache."""

from __future__ import annotations

import hashlib
import importlib
import pkgutil
import sys
from functools import lru_cache
from pathlib import Path

from opslot._base.errors import PatchError
from opslot.patchgen.cache import cache_homes, prune, read_sealed, touch, write_sealed
from opslot.patchgen.config import PatchConfig
from opslot.patchgen.source import Release, installed_release

GENERATED_PACKAGE = "opslot.generated"
MODELS_PACKAGE = "opslot.models"

_registered: dict[str, PatchConfig] = {}


def register_patch(arch: str, patch: PatchConfig, *, replace: bool = False) -> None:
    """Make `opslot.generated.<arch>` come from `patch`, for this process.

    Raises:
        PatchError: the architecture is registered with another patch (unless `replace`), or its generated module is
            imported already.
    """
    if not arch.isidentifier():
        raise PatchError(f"an architecture's name has to be a Python identifier, got {arch!r}")
    known = _registered.get(arch)
    if known is not None and known.digest != patch.digest and not replace:
        raise PatchError(f"{arch} is registered with another patch; pass replace=True to take the new one")
    if (known is None or known.digest != patch.digest) and f"{GENERATED_PACKAGE}.{arch}" in sys.modules:
        raise PatchError(f"{GENERATED_PACKAGE}.{arch} is imported already; register the patch before the import")
    _registered[arch] = patch


def find_patch(arch: str) -> PatchConfig | None:
    """The patch of an architecture: registered, or the attribute `patch` of `opslot.models.<arch>.patch`.

    For an architecture without either, what `opslot.models` finds in its code; None where that is nothing.
    """
    if arch in _registered:
        return _registered[arch]
    name = f"{MODELS_PACKAGE}.{arch}.patch"
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name == MODELS_PACKAGE:
            return None
        if error.name in (name, f"{MODELS_PACKAGE}.{arch}"):
            return importlib.import_module(f"{MODELS_PACKAGE}.discovery").patch_of(arch)
        raise
    patch = getattr(module, "patch", None)
    if not isinstance(patch, PatchConfig):
        raise PatchError(f"{name} has to hold a PatchConfig called `patch`, found {type(patch).__name__}")
    return patch


def known_archs() -> list[str]:
    """Architectures that have a patch, sorted."""
    archs = set(_registered)
    try:
        models = importlib.import_module(MODELS_PACKAGE)
    except ModuleNotFoundError:
        return sorted(archs)
    for info in pkgutil.iter_modules(models.__path__):
        if info.ispkg and any((Path(path) / info.name / "patch.py").is_file() for path in models.__path__):
            archs.add(info.name)
    return sorted(archs)


def require_patch(arch: str) -> PatchConfig:
    """Like `find_patch`, but an unknown architecture raises and names the known ones."""
    patch = find_patch(arch)
    if patch is None:
        raise PatchError(f"no patch for {arch!r}; there are patches for {', '.join(known_archs())}")
    return patch


def materialize(arch: str, patch: PatchConfig | None = None, release: Release | None = None) -> Path:
    """The file of an architecture's generated module, generated now unless the cache holds it.

    Args:
        arch: architecture, the folder's name under `transformers/models`.
        patch: the patch; the architecture's own by default.
        release: the Transformers release; the installed one by default.

    Returns:
        Path of a file that ends in `models/<arch>/<patch.target_file>`.
    """
    patch = patch or require_patch(arch)
    release = release or installed_release()
    relative = Path("generated", arch, cache_key(patch, release), "models", arch, patch.target_file)
    homes = cache_homes()
    for home in homes:
        if read_sealed(home / relative) is not None:
            touch(home / relative.parents[2])
            return home / relative
    from opslot.patchgen.engine import generate

    text = generate(patch, release).text
    path = homes[-1] / relative
    try:
        write_sealed(path, text)
    except OSError as error:
        raise PatchError(f"cannot write {path}: {error.strerror}; set OPSLOT_CACHE to another place") from error
    prune(path.parents[3])
    return path


def cache_key(patch: PatchConfig, release: Release) -> str:
    """Name of a cache entry: everything that the generated text depends on."""
    parts = [patch.digest, engine_digest()]
    parts += [release.module(name).digest for name in patch.upstream_modules]
    return f"{release.version}-{hashlib.sha256(' '.join(parts).encode()).hexdigest()[:16]}"


@lru_cache(maxsize=1)
def engine_digest() -> str:
    """Hash of this package's own code, so that a new version never takes an old one's output."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
