"""Slots of Qwen3Moe: those of a dense decoder, and its experts and load-balancing loss."""

from opslot.models._common.patches import LOAD_BALANCING_LOSS, ROUTED_EXPERTS, llama_like
from opslot.patchgen import OpSlot

patch = llama_like("qwen3_moe", "Qwen3Moe")
# The decorator picks among upstream's own implementations, so the slot has to come before it.
patch.slot_method(
    "Qwen3MoeExperts.forward",
    OpSlot("moe_experts", "standard"),
    args="hidden_states, self.gate_up_proj, self.down_proj, top_k_index, top_k_weights",
    expects=ROUTED_EXPERTS,
    outside_decorators=True,
)
patch.slot_calls(
    "load_balancing_loss_func",
    OpSlot("load_balancing_loss", "standard"),
    expects={"load_balancing_loss_func": LOAD_BALANCING_LOSS},
)
patch.depends_on("transformers.integrations.moe", "use_experts_implementation")
