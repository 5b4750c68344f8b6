"""Names of modules that upper rooms provide and lower rooms load when they need them."""

from __future__ import annotations

PATCH_FINDERS: list[str] = []
"""Modules that `opslot.patchgen` asks for patches; `opslot/__init__.py` fills it."""
