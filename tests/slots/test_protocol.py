"""The names of the slot protocol are defined in one module."""

from pathlib import Path

import opslot
from opslot.patchgen import Slot
from opslot.slots import protocol

SOURCE = Path(opslot.__file__).parent
# These write the text of generated modules.
EMITTERS = (
    "patchgen/",
    "models/discovery/",
    "ops/causal_conv1d/forms.py",
    "ops/chunk_gated_delta_rule/forms.py",
    "ops/attention/mask_forms.py",
    "ops/attention/forms.py",
    "ops/mamba_chunk_scan/forms.py",
)


def test_only_protocol_defines_its_names():
    defined_in = {
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        if "_opslot_" in path.read_text() and not str(path.relative_to(SOURCE)).startswith(EMITTERS)
    }
    assert defined_in == {"slots/protocol.py"}


def test_generated_modules_use_the_names_of_the_protocol():
    from opslot.generated import gemma2

    slot = Slot("rms_norm", "weight_offset")
    assert slot.attribute == protocol.slot_attribute("rms_norm")
    assert getattr(gemma2.Gemma2RMSNorm, protocol.SLOTS) == {"rms_norm": ("rms_norm", "weight_offset")}
    assert getattr(gemma2.Gemma2RMSNorm, slot.attribute) is None
    from opslot.generated import chameleon

    parts = [part for cls in vars(chameleon).values() if isinstance(cls, type) for part in protocol.skipped_parts(cls)]
    assert "cross_entropy_loss" in {part.op.split("/")[0] for part in parts}
    from opslot.generated import qwen3_vl

    assert hasattr(qwen3_vl.Qwen3VLForConditionalGeneration, protocol.UNKNOWN_LAYERS)
