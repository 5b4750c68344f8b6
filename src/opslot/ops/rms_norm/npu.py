"""torch_npu's RMSNorm for Ascend."""

from __future__ import annotations

import torch_npu
from torch import Tensor


def standard(hidden_states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`op.standard` through `torch_npu.npu_rms_norm`, which also returns the rows' inverse norms."""
    return torch_npu.npu_rms_norm(hidden_states, weight, epsilon=eps)[0]
