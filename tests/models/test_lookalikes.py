"""Code that resembles a form without computing the same is skipped."""

from __future__ import annotations

import pytest

from opslot.models.discovery import discover
from opslot.patchgen import PatchConfig, PatchError, Slot
from opslot.patchgen.engine import generate
from opslot.patchgen.source import installed_release

ROTARY_FULL, ROTATE_HALF = "be80094eafa5", "3d488c0cec66"


@pytest.mark.parametrize("arch", ["mistral", "smollm3", "ministral"])
def test_decoders_built_like_llama(arch):
    text = generate(discover(arch).patch, installed_release())
    compile(text, arch, "exec")
    assert text.count("_opslot_slots = {") == 7


@pytest.mark.parametrize(
    ("arch", "symbol", "op"),
    [
        ("gemma", "GemmaRMSNorm", "rms_norm/weight_offset"),
        ("olmo2", "Olmo2RMSNorm", "rms_norm/cast_after_weight"),
        ("chameleon", "ChameleonForConditionalGeneration", None),
        ("glm", "GlmMLP", "swiglu_mlp/fused_gate_up"),
        ("cohere", "CohereLayerNorm", "layer_norm/standard"),
    ],
    ids=["weight plus one", "weight in fp32", "masked logits", "fused gate and up", "layer norm"],
)
def test_lookalikes_get_their_own_variant_or_none(arch, symbol, op):
    found = {match.symbol: str(match) for match in discover(arch).matches}
    assert found.get(symbol) == op


@pytest.mark.parametrize("arch", ["nanochat", "blt"])
def test_rotary_with_another_rotate_half_is_skipped(arch):
    """Both have exactly Llama's `apply_rotary_pos_emb`, but another `rotate_half`, and forms of their own."""
    patch = PatchConfig(f"transformers.models.{arch}.modeling_{arch}")
    expects = {"apply_rotary_pos_emb": ROTARY_FULL, "rotate_half": ROTATE_HALF}
    patch.slot_calls("apply_rotary_pos_emb", Slot("rotary_pos_emb", "full"), expects=expects)
    with pytest.raises(PatchError, match="rotate_half computes something else"):
        generate(patch, installed_release())
    text = generate(discover(arch).patch, installed_release())
    assert "_opslot_rotary_pos_emb(query_states, key_states, cos, sin)" not in text


def test_rotation_in_the_other_direction_gets_the_negative_sine():
    text = generate(discover("nanochat").patch, installed_release())
    assert "self._opslot_rotary_pos_emb(query_states, key_states, cos, -sin) if self._opslot_rotary_pos_emb" in text
