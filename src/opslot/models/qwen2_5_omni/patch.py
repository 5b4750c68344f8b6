"""Qwen2.5-Omni: the thinker trains."""

from __future__ import annotations

from opslot.models._common.sub_model import train_sub_model
from opslot.patchgen import PatchConfig
from opslot.slots.protocol import SubModel

patch = PatchConfig("transformers.models.qwen2_5_omni.modeling_qwen2_5_omni")
train_sub_model(
    patch,
    "Qwen2_5OmniForConditionalGeneration",
    "Qwen2_5OmniThinkerForConditionalGeneration",
    SubModel(
        "thinker",
        "thinker_config",
        ("talker", "token2wav"),
        {"enable_audio_output": False},
        # Transformers' from_pretrained requires it.
        ("spk_dict.pt",),
    ),
    built_by="enable_talker",
    classes=(
        "Qwen2_5OmniTalkerForConditionalGeneration",
        "Qwen2_5OmniTalkerModel",
        "Qwen2_5OmniToken2WavModel",
        "Qwen2_5OmniToken2WavDiTModel",
        "Qwen2_5OmniToken2WavBigVGANModel",
        "SnakeBeta",
        "UpSample1d",
        "DownSample1d",
        "AMPBlock",
    ),
)
