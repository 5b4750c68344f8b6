"""Rewrites upstream modeling modules: a patch names symbols in their text and what changes there."""

from opslot._base.errors import PatchError
from opslot.patchgen.config import PatchConfig
from opslot.patchgen.edits import Slot
from opslot.patchgen.materialization import materialize, register_patch
from opslot.patchgen.primitives import create_patch_from_external

__all__ = [
    "PatchConfig",
    "PatchError",
    "Slot",
    "create_patch_from_external",
    "materialize",
    "register_patch",
]
