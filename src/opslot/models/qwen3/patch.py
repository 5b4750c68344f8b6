"""Slots of Qwen3."""

from opslot.models._common.patches import llama_like

patch = llama_like("qwen3", "Qwen3")
