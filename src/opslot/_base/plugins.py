"""Names of modules that higher layers register and lower layers import on demand."""

from __future__ import annotations

PATCH_FINDERS: list[str] = []
"""Modules from which `opslot.patchgen` loads patches; filled by `opslot/__init__.py`."""
