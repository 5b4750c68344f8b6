"""Mistral Large 4: images as in Mistral 3."""

from __future__ import annotations

from opslot.models.mistral3.patch import patch as mistral3
from opslot.patchgen import PatchConfig

patch = PatchConfig("transformers.models.mistral_large4.modeling_mistral_large4")
patch.extend(mistral3, name_map={"Mistral3": "MistralLarge4"})
