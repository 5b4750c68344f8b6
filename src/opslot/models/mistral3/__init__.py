"""Mistral 3."""

from opslot.models._registry import register_architecture

register_architecture("mistral3")
