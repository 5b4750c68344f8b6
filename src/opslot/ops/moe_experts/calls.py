"""What generated modules call for their experts."""

from __future__ import annotations

from typing import Any

from opslot.slots.protocol import slot_attribute


def has_kernel(experts: Any) -> bool:
    """Whether a kernel is bound to experts, also inside a layer of PEFT, which does not have their attributes."""
    owner = experts.get_base_layer() if hasattr(experts, "get_base_layer") else experts
    return getattr(owner, slot_attribute("moe_experts")) is not None
