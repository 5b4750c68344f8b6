"""Mistral Large 4."""

from opslot.models._registry import register_architecture

register_architecture("mistral_large4")
