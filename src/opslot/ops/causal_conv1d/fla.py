"""flash-linear-attention's causal convolution."""

from __future__ import annotations

import torch
from fla.modules.convolution import causal_conv1d as fla_conv
from torch import Tensor


def causal_conv1d(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Contract: see `op.reference`."""
    out, _ = fla_conv(
        hidden_states.transpose(1, 2),
        weight,
        bias,
        activation=activation,
        cu_seqlens=None if cu_seqlens is None else cu_seqlens.to(torch.int64),
    )
    return out.transpose(1, 2)
