"""Liger-Kernel's RMSNorm, without its in-place backward, which would overwrite a gradient that may still be needed."""

from __future__ import annotations

from liger_kernel.ops.rms_norm import LigerRMSNormFunction
from torch import Tensor

from opslot.ops._common.arguments import in_one_dtype


def standard(hidden_states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`op.standard`; mixed dtypes are promoted first, since Liger returns that of `hidden_states`."""
    return LigerRMSNormFunction.apply(*in_one_dtype(hidden_states, weight), eps, 0.0, "llama", False)


def weight_offset(hidden_states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`op.weight_offset`."""
    return LigerRMSNormFunction.apply(hidden_states, weight, eps, 1.0, "gemma", False)


def cast_after_weight(hidden_states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`op.cast_after_weight`: Liger's "gemma" casting mode without the offset."""
    return LigerRMSNormFunction.apply(hidden_states, weight, eps, 0.0, "gemma", False)
