"""The supported architectures: `patchgen.lock` has the slots of each in each release of Transformers."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from typing import TYPE_CHECKING

from opslot.patchgen.lock import Lock, lock_path
from opslot.patchgen.source import Release

if TYPE_CHECKING:
    from opslot.patchgen import PatchConfig


@cache
def supported_architectures() -> tuple[str, ...]:
    """The architectures that the lock lists, sorted."""
    try:
        return tuple(sorted(json.loads(lock_path().read_text(encoding="utf-8"))["archs"]))
    except (OSError, ValueError, LookupError):
        return ()


@cache
def lock_digest() -> str:
    """Hash of the lock; "" without one."""
    try:
        return hashlib.sha256(lock_path().read_bytes()).hexdigest()
    except OSError:
        return ""


@cache
def _lock() -> Lock:
    return Lock.load(lock_path())


def _of_op(slot: str) -> str:
    """Where a slot is, and its op without the variant."""
    return slot.rpartition("/")[0]


def replaces(patch: PatchConfig, symbol: str) -> bool:
    """Whether a patch replaces or excludes a symbol, or the class that has it."""
    return any(whole in (symbol, symbol.split(".")[0]) for edit in patch.edits for whole in edit.whole)


def lost_slots(arch: str, patch: PatchConfig, release: Release, added: PatchConfig | None = None) -> str:
    """A warning that names the expected slots that an architecture lacks in a release; "" if it has them all.

    Where a slot of the op has another variant, none is lost: releases change what a part computes. Nor is one of a part
    that the additions to what is discovered replace.
    """
    if arch not in supported_architectures():
        return ""
    lock = _lock()
    found = {_of_op(slot) for slot in patch.slots}
    lost = [
        slot
        for slot in lock.expected_slots(arch, release.version)
        if _of_op(slot) not in found and not (added and replaces(added, slot.partition(" ")[0]))
    ]
    if not lost:
        return ""
    return (
        f"{arch} has fewer slots in transformers {release.version} than in {lock.nearest(arch, release.version)}: "
        f"no {', '.join(lost)}; these parts keep Transformers' implementation (`patchgen {arch} --check` shows what "
        "changed)"
    )
