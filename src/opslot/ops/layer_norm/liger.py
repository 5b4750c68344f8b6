"""Liger-Kernel's layer norm, which requires a weight and a bias."""

from __future__ import annotations

from liger_kernel.ops.layer_norm import LigerLayerNormFunction
from torch import Tensor

from opslot.ops._common.arguments import reject
from opslot.ops.layer_norm.op import checked

_KERNEL = "layer_norm_implementation='liger_kernel'"


def standard(hidden_states: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """`op.standard` with weight and bias."""
    dtype = checked(_KERNEL, hidden_states, weight, bias)
    if weight is None or bias is None:
        reject(_KERNEL, "bias" if bias is None else "weight", "it is None", "use triton or eager")
    return LigerLayerNormFunction.apply(hidden_states.to(dtype).contiguous(), weight, bias, eps)
