"""Patches for `opslot.patchgen`: what discovery finds, extended by `models/<arch>/patch.py` where there is one."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
from pathlib import Path
from typing import TypeGuard

from opslot.models.discovery.collected_forms import forms_digest
from opslot.models.discovery.engine import discover, skipped_by_class
from opslot.models.discovery.supported import lock_digest, lost_slots, replaces, supported_architectures
from opslot.patchgen import PatchConfig, PatchError
from opslot.patchgen.edits import ClassAttribute, Edit, Exclude
from opslot.patchgen.forms import ModuleView, Skip
from opslot.patchgen.materialization import REGISTERED_PATCHES
from opslot.patchgen.names import is_elsewhere, modeling_module
from opslot.patchgen.source import Release
from opslot.slots.protocol import LOST_SLOTS, SKIPPED

MODELS_PACKAGE = "opslot.models"


def additions(arch: str) -> PatchConfig | None:
    """The registered patch, else `patch` of `opslot.models.<arch>.patch`; None if there is neither."""
    if arch in REGISTERED_PATCHES:
        return REGISTERED_PATCHES[arch]
    name = f"{MODELS_PACKAGE}.{arch}.patch"
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name in (name, f"{MODELS_PACKAGE}.{arch}"):
            return None
        raise
    patch = getattr(module, "patch", None)
    if not isinstance(patch, PatchConfig):
        raise PatchError(
            f"{name} is not a patch module",
            found=f"a {type(patch).__name__} as `patch`",
            hint="write `patch = PatchConfig(...)`",
        )
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
    known = arch in supported_architectures() or (is_elsewhere(arch) and found.patch.edits)
    if not found.matches and added is None and not known:
        return None
    # A copy: what is found is kept for the next call.
    patch = _extended(found.patch, added, release)
    if lost := lost_slots(arch, patch, release, added):
        patch.add_final_block(f"{LOST_SLOTS} = {lost!r}")
    return patch


def _extended(found: PatchConfig, added: PatchConfig | None, release: Release) -> PatchConfig:
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
    replaced = [edit for edit in patch.edits if replaces(added, edit.target)]
    patch.edits = [edit for edit in patch.edits if edit not in replaced]
    _skip(replaced, added, patch, release)
    patch.extend(added)
    return patch


def _skip(replaced: list[Edit], added: PatchConfig, patch: PatchConfig, release: Release) -> None:
    """Report the slots of replaced edits as skipped, unless the additions have a slot of the op there."""
    module = ModuleView(release.module(patch.source_module))
    own = {slot.partition("/")[0] for slot in added.slots}
    excluded = {name for edit in added.edits if isinstance(edit, Exclude) for name in edit.whole}
    slots = ((edit.target, getattr(edit, "slot", None)) for edit in replaced)
    skips = [
        Skip(target, str(slot), "is replaced by a patch")
        for target, slot in slots
        if slot is not None and f"{target} {slot.op}" not in own and target.split(".")[0] not in excluded
    ]
    known = {edit.target: edit.value for edit in patch.edits if _is_skipped(edit)}
    for name, entries in skipped_by_class(module, skips).items():
        patch.set_attribute(name, SKIPPED, known.get(name, ()) + entries)


def _is_skipped(edit: Edit) -> TypeGuard[ClassAttribute]:
    return isinstance(edit, ClassAttribute) and edit.attribute == SKIPPED


def digest(arch: str, release: Release) -> str | None:
    """Hash of everything that `find_patch` depends on; None for an architecture whose code is not there."""
    added = additions(arch)
    texts = [] if added is None else [added.digest, *(release.module(name).digest for name in added.upstream_modules)]
    try:
        texts += [release.module(modeling_module(arch)).digest, release.module("transformers.modeling_layers").digest]
    except PatchError:
        if added is None:
            return None
    return hashlib.sha256(" ".join([forms_digest(), lock_digest(), *texts]).encode()).hexdigest()


def architectures() -> list[str]:
    """The supported architectures, and those with additions of their own."""
    spec = importlib.util.find_spec(MODELS_PACKAGE)
    assert spec is not None
    places = spec.submodule_search_locations or ()
    own = {file.parent.name for place in places for file in Path(place).glob("*/patch.py")}
    return sorted({*supported_architectures(), *REGISTERED_PATCHES, *own})
