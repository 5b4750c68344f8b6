"""RMSNorm by torch's own function for few tokens, and in Triton for others.

torch's multiplies by the weight in fp32 and then casts, as `cast_after_weight` does; `standard` casts before, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn.functional import rms_norm

from opslot.ops._common.few_tokens import are_few_tokens
from opslot.ops.rms_norm import triton


def _weighted(of_many: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def norm(hidden_states: Tensor, weight: Tensor, eps: float) -> Tensor:
        if are_few_tokens(hidden_states, weight):
            return rms_norm(hidden_states, weight.shape, weight, eps)
        return of_many(hidden_states, weight, eps)

    return norm


def _with_residual(of_many: Callable[..., Any]) -> Callable[..., Any]:
    def norm(hidden_states: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if are_few_tokens(hidden_states, residual, weight) and residual.shape == hidden_states.shape:
            total = residual + hidden_states
            return rms_norm(total, weight.shape, weight, eps), total
        return of_many(hidden_states, residual, weight, eps)

    return norm


standard = _weighted(triton.standard)
cast_after_weight = _weighted(triton.cast_after_weight)
fused_add = _with_residual(triton.fused_add)
fused_add_cast_after_weight = _with_residual(triton.fused_add_cast_after_weight)
