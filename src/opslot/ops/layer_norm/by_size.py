"""Layer norm by torch's own function for few tokens, and in Triton for others."""

from __future__ import annotations

from torch import Tensor

from opslot.ops._common.few_tokens import are_few_tokens
from opslot.ops.layer_norm import op, triton


def standard(hidden_states: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    norm = op.standard if are_few_tokens(hidden_states, weight, bias) else triton.standard
    return norm(hidden_states, weight, bias, eps)
