"""Qwen3-Omni."""

from opslot.models._registry import register_architecture

register_architecture("qwen3_omni_moe")
