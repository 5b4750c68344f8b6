"""RMSNorm by torch's own function for few tokens, and in Triton for others.

torch's multiplies by the weight in fp32 and then casts, as `cast_after_weight` does; `standard` rounds once more.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import rms_norm

from opslot.ops._common.few_tokens import are_few_tokens
from opslot.ops.rms_norm import triton


def standard(hidden_states: Tensor, weight: Tensor, eps: float) -> Tensor:
    if are_few_tokens(hidden_states, weight):
        return rms_norm(hidden_states, weight.shape, weight, eps)
    return triton.standard(hidden_states, weight, eps)


def cast_after_weight(hidden_states: Tensor, weight: Tensor, eps: float) -> Tensor:
    if are_few_tokens(hidden_states, weight):
        return rms_norm(hidden_states, weight.shape, weight, eps)
    return triton.cast_after_weight(hidden_states, weight, eps)


def fused_add(hidden_states: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    if are_few_tokens(hidden_states, residual, weight) and residual.shape == hidden_states.shape:
        total = residual + hidden_states
        return rms_norm(total, weight.shape, weight, eps), total
    return triton.fused_add(hidden_states, residual, weight, eps)


def fused_add_cast_after_weight(
    hidden_states: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    if are_few_tokens(hidden_states, residual, weight) and residual.shape == hidden_states.shape:
        total = residual + hidden_states
        return rms_norm(total, weight.shape, weight, eps), total
    return triton.fused_add_cast_after_weight(hidden_states, residual, weight, eps)
