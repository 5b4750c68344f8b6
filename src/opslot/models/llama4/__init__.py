"""Llama 4."""

from opslot.models._registry import register_architecture

register_architecture("llama4")
