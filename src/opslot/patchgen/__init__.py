"""Rewrites upstream modeling modules: a patch names places in their text and what changes there."""

from opslot._base.errors import PatchError
from opslot.patchgen.config import PatchConfig, create_patch_from_external
from opslot.patchgen.edits import OpSlot
from opslot.patchgen.materialization import materialize, register_patch

__all__ = [
    "OpSlot",
    "PatchConfig",
    "PatchError",
    "create_patch_from_external",
    "materialize",
    "register_patch",
]
