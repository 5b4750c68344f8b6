"""Qwen3-Omni: the thinker trains."""

from __future__ import annotations

from opslot.models._common.sub_model import train_sub_model
from opslot.patchgen import PatchConfig
from opslot.slots.protocol import SubModel

patch = PatchConfig("transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe")
train_sub_model(
    patch,
    "Qwen3OmniMoeForConditionalGeneration",
    "Qwen3OmniMoeThinkerForConditionalGeneration",
    SubModel("thinker", "thinker_config", ("talker", "code2wav"), {"enable_audio_output": False}),
    built_by="enable_talker",
    classes=(
        "Qwen3OmniMoeTalkerForConditionalGeneration",
        "Qwen3OmniMoeTalkerModel",
        "Qwen3OmniMoeTalkerTextExperts",
        "Qwen3OmniMoeTalkerCodePredictorModel",
        "Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration",
        "Qwen3OmniMoeCode2Wav",
        "Qwen3OmniMoeCode2WavDecoderBlock",
        "Qwen3OmniMoeCode2WavTransformerModel",
        "SnakeBeta",
    ),
)
