"""The shared patches fit what they were written for, and refuse architectures that only look like it."""

from __future__ import annotations

import pytest

from opslot.models._common.patches import ROTARY_FULL, ROTATE_HALF, llama_like
from opslot.patchgen import OpSlot, PatchConfig, PatchError
from opslot.patchgen.engine import generate
from opslot.patchgen.source import installed_release


@pytest.mark.parametrize(
    ("arch", "prefix"), [("mistral", "Mistral"), ("smollm3", "SmolLM3"), ("ministral", "Ministral")]
)
def test_other_decoders_built_like_llama_need_no_code(arch, prefix):
    text = generate(llama_like(arch, prefix), installed_release()).text
    compile(text, arch, "exec")
    assert text.count("_opslot_slots = {") == 6


@pytest.mark.parametrize(
    ("arch", "prefix", "problem"),
    [
        ("gemma", "Gemma", r"GemmaRMSNorm\.forward computes something else"),
        ("olmo2", "Olmo2", r"Olmo2RMSNorm\.forward computes something else"),
        ("granite", "Granite", "slot cross_entropy_loss/causal in GraniteForCausalLM.forward"),
        ("glm", "Glm", r"slot swiglu_mlp/standard in GlmMLP\.forward"),
        ("cohere", "Cohere", r"has no CohereRMSNorm\.forward"),
    ],
    ids=["weight plus one", "weight in fp32", "scaled logits", "fused gate and up", "layer norm"],
)
def test_lookalikes_are_refused(arch, prefix, problem):
    with pytest.raises(PatchError, match=problem):
        generate(llama_like(arch, prefix), installed_release())


@pytest.mark.parametrize("arch", ["nanochat", "blt"])
def test_rotary_with_another_rotate_half_is_refused(arch):
    """Both have Llama's `apply_rotary_pos_emb` to the letter, and another `rotate_half` under it."""
    patch = PatchConfig(f"transformers.models.{arch}.modeling_{arch}")
    expects = {"apply_rotary_pos_emb": ROTARY_FULL, "rotate_half": ROTATE_HALF}
    patch.slot_calls("apply_rotary_pos_emb", OpSlot("rotary_pos_emb", "full"), expects=expects)
    with pytest.raises(PatchError, match="rotate_half computes something else"):
        generate(patch, installed_release())
