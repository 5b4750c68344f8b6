"""GELU by tanh as one function of torch, where Transformers computes it in eight."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def gelu_tanh(x: Tensor) -> Tensor:
    """`op.gelu_tanh`; in 16 bits computed in fp32."""
    return F.gelu(x, approximate="tanh")
