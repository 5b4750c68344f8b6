"""Checkpoints of Qwen3-MoE: per expert on the hub, fused from trainers; either is found from the tensors."""

from __future__ import annotations

from torch import nn

from opslot.checkpoint import ExpertTensorConverter

HUB_LAYOUT = "per_expert"


def create_checkpoint_tensor_converter(model: nn.Module) -> ExpertTensorConverter:
    """The converter of `model`'s experts, a causal head model's or the base model's alike."""
    return ExpertTensorConverter.for_model(model)
