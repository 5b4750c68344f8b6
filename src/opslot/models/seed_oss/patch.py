"""Slots of SeedOss."""

from opslot.models._common.patches import llama_like

patch = llama_like("seed_oss", "SeedOss")
