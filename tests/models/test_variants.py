"""Every variant of every op is in some architecture of a supported release."""

from __future__ import annotations

from pathlib import Path

import transformers

import opslot.ops
from opslot.models.discovery import discover
from opslot.patchgen.lock import Lock, lock_path
from opslot.slots import KERNEL_REGISTRY

# The loss reaches token_log_probs with `return_log_probs=True`: tests/models/test_log_probs.py.
_WITHOUT_SLOT = {"cross_entropy_loss/token_log_probs"}


def test_every_variant_is_matched_in_some_architecture():
    ops = Path(str(opslot.ops.__file__)).parent
    folders = [file.parent.name for file in ops.glob("*/forms.py")]
    missing = {f"{name}/{variant}" for name in folders for variant in KERNEL_REGISTRY.op(name).variants}
    locked = Lock.load(lock_path()).slots
    for releases in locked.values():
        for slots in releases.values():
            missing -= {slot.split(" ")[1] for slot in slots}
    # Architectures that a form names are probably those with the variants that are missing.
    forms = "".join(file.read_text() for file in ops.glob("*/*forms.py"))
    others = [file.parent.name for file in (Path(str(transformers.__file__)).parent / "models").glob("*/modeling_*.py")]
    for name in sorted({*others} - locked.keys(), key=lambda name: (f'"{name}"' not in forms, name)):
        if missing - _WITHOUT_SLOT:
            missing -= {str(match) for match in discover(name).matches}
    assert missing <= _WITHOUT_SLOT
