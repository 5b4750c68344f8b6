"""DeepSeek-V4."""

from opslot.models._registry import register_architecture

register_architecture("deepseek_v4")
