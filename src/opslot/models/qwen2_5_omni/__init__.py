"""Qwen2.5-Omni."""

from opslot.models._registry import register_architecture

register_architecture("qwen2_5_omni")
