"""torch_npu's rotary embedding for Ascend."""

from __future__ import annotations

import torch_npu
from torch import Tensor

from opslot.ops.rotary_pos_emb.op import with_batch


def full(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """`op.full` through `torch_npu.npu_rotary_mul`, whose default mode is NeoX layout."""
    cos, sin, unsqueeze_dim = with_batch(cos, sin, unsqueeze_dim)
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return torch_npu.npu_rotary_mul(q, cos, sin), torch_npu.npu_rotary_mul(k, cos, sin)
