"""Slots of Llama."""

from opslot.models._common.patches import llama_like

patch = llama_like("llama", "Llama")
