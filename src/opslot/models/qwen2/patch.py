"""Slots of Qwen2."""

from opslot.models._common.patches import llama_like

patch = llama_like("qwen2", "Qwen2")
