"""Hugging Face Transformers: its grouped experts, and its own classes with SDPA."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def grouped_mm(
    hidden_states: Tensor, gate_up_proj: Tensor, down_proj: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The experts that Transformers runs unless told otherwise."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    experts, hidden, intermediate = down_proj.shape
    config = Qwen3MoeConfig(hidden_size=hidden, moe_intermediate_size=intermediate, num_experts=experts)
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        module = Qwen3MoeExperts(config)
    weights = {"gate_up_proj": gate_up_proj, "down_proj": down_proj}
    return torch.func.functional_call(module, weights, (hidden_states, top_k_index, top_k_weights))


KERNELS = {("moe_experts", "standard"): {"grouped_mm": grouped_mm}}


def build(config: dict[str, Any], dtype: torch.dtype, device: str, compiled: bool = False) -> nn.Module:
    """A causal language model of Transformers' own class in training mode."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**config), dtype=dtype, attn_implementation="sdpa"
        )
    model.train()
    if compiled:
        model = torch.compile(model)
    return model
