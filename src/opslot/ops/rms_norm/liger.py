"""Liger-Kernel's RMSNorm, with its in-place backward off: it would overwrite a gradient that others may still read."""

from __future__ import annotations

from liger_kernel.ops.rms_norm import LigerRMSNormFunction
from torch import Tensor

from opslot.ops._common.library import refuse


def standard(hidden_states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`op.standard` where both tensors share a dtype: Liger returns that of `hidden_states`, upstream the wider one."""
    if weight.dtype != hidden_states.dtype:
        refuse(
            "rms_norm_implementation='liger_kernel'",
            "weight",
            f"its dtype is {weight.dtype} beside hidden_states' {hidden_states.dtype}",
            "use triton, which serves mixed dtypes, or eager",
        )
    return LigerRMSNormFunction.apply(hidden_states, weight, eps, 0.0, "llama", False)


def offset(hidden_states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`op.offset`."""
    return LigerRMSNormFunction.apply(hidden_states, weight, eps, 1.0, "gemma", False)
