"""The supported architectures: `patchgen.lock` says which slots each has in each release of Transformers."""

from __future__ import annotations


def supported_architectures() -> list[str]:
    return []


def lock_digest() -> str:
    return ""


def lost_slots(found: object, release: object) -> str:
    return ""
