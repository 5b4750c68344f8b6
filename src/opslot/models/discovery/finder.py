"""Patches for `opslot.patchgen`: what discovery finds, extended by `models/<arch>/patch.py` where there is one."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path

from opslot.models.discovery.engine import discover, source_module
from opslot.models.discovery.forms import forms_digest
from opslot.models.discovery.supported import lock_digest, lost_slots, supported_architectures
from opslot.patchgen import PatchConfig, PatchError
from opslot.patchgen.materialization import GENERATED_PACKAGE
from opslot.patchgen.source import Release

MODELS_PACKAGE = "opslot.models"

_added: dict[str, PatchConfig] = {}


def add_patch(arch: str, patch: PatchConfig, *, replace: bool = False) -> None:
    """Extend what is discovered in an architecture, for this process, as its `patch.py` would.

    Raises:
        PatchError: the architecture has another patch (unless `replace`), or its generated module is already imported.
    """
    known = _added.get(arch)
    if known is not None and known.digest == patch.digest:
        return
    if known is not None and not replace:
        raise PatchError(f"{arch} is registered with another patch; pass replace=True to replace it")
    if f"{GENERATED_PACKAGE}.{arch}" in sys.modules:
        raise PatchError(f"{GENERATED_PACKAGE}.{arch} is already imported; register the patch before the import")
    _added[arch] = patch


def additions(arch: str) -> PatchConfig | None:
    """The patch that `add_patch` was given, else `patch` of `opslot.models.<arch>.patch`; None if there is neither."""
    if arch in _added:
        return _added[arch]
    name = f"{MODELS_PACKAGE}.{arch}.patch"
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name in (name, f"{MODELS_PACKAGE}.{arch}"):
            return None
        raise
    patch = getattr(module, "patch", None)
    if not isinstance(patch, PatchConfig):
        raise PatchError(f"{name} has to have a PatchConfig called `patch`, found {type(patch).__name__}")
    return patch


def find_patch(arch: str, release: Release) -> PatchConfig | None:
    """The discovered edits with the architecture's additions after them; None where there is neither."""
    added = additions(arch)
    if added is not None and not added.discover:
        return added
    try:
        found = discover(arch, release)
    except PatchError:
        return added
    if not found.matches and added is None and arch not in supported_architectures():
        return None
    # A copy: what is found is kept for the next call.
    patch = _extended(found.patch, added)
    if lost := lost_slots(arch, patch, release):
        patch.add_final_block(f"_opslot_lost_slots = {lost!r}")
    return patch


def _extended(found: PatchConfig, added: PatchConfig | None) -> PatchConfig:
    """Both, without discovered edits of what the additions replace or exclude."""
    described = added or found
    patch = PatchConfig(
        described.source_module,
        target_file=described.target_file,
        description=described.description or found.description,
    )
    patch.extend(found)
    if added is None:
        return patch
    replaced = {symbol for edit in added.edits for symbol in edit.whole}
    patch.edits = [edit for edit in patch.edits if not replaced & {edit.target, edit.target.split(".")[0]}]
    patch.extend(added)
    return patch


def digest(arch: str, release: Release) -> str | None:
    """Hash of everything that `find_patch` depends on; None for an architecture that Transformers does not have."""
    added = additions(arch)
    try:
        texts = [release.module(source_module(arch)).digest, release.module("transformers.modeling_layers").digest]
    except PatchError:
        return added.digest if added is not None else None
    if added is not None:
        texts += [added.digest, *(release.module(name).digest for name in added.upstream_modules)]
    return hashlib.sha256(" ".join([forms_digest(), lock_digest(), *texts]).encode()).hexdigest()


def architectures() -> list[str]:
    """The supported architectures, and those with additions of their own."""
    spec = importlib.util.find_spec(MODELS_PACKAGE)
    assert spec is not None
    places = spec.submodule_search_locations or ()
    own = {file.parent.name for place in places for file in _patches_in(place)}
    return sorted({*supported_architectures(), *_added, *own})


def _patches_in(place: str) -> list[Path]:
    return list(Path(place).glob("*/patch.py"))
