"""quack-kernels' RMSNorm on CuTe (SM90 and newer), with a custom backward."""

from __future__ import annotations

import torch
from quack.rmsnorm import rmsnorm
from torch import Tensor

from opslot.ops._common.arguments import reject, require_floats

_LABEL = "rms_norm_implementation='quack'"


def _check(x: Tensor, weight: Tensor | None) -> None:
    """Raise KernelError for inputs on which quack would fail with an assertion or a compile error."""
    require_floats(_LABEL, hidden_states=x, weight=weight)
    if x.shape[-1] % 8:
        found = f"its rows have {x.shape[-1]} elements, not a multiple of 8"
        reject(_LABEL, "hidden_states", found, "use triton or eager")
    if weight is not None and weight.shape != x.shape[-1:]:
        reject(_LABEL, "weight", f"its shape is {tuple(weight.shape)}, not ({x.shape[-1]},)", "use eager")


def standard(hidden_states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`op.standard` for float32, bfloat16 and float16 and widths that are multiples of 8."""
    _check(hidden_states, weight)
    dtype = torch.promote_types(weight.dtype, hidden_states.dtype)
    return rmsnorm(hidden_states, weight, out_dtype=dtype, eps=eps)


def weight_offset(hidden_states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`op.weight_offset`, within the limits of `standard`; quack-kernels 0.6.3 and later add the offset, in fp32."""
    _check(hidden_states, weight)
    return rmsnorm(hidden_states, weight, eps=eps, weight_offset=1.0)


def cast_after_weight(hidden_states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`op.cast_after_weight`, within the limits of `standard`: quack rounds once, at the end."""
    _check(hidden_states, weight)
    return rmsnorm(hidden_states, weight, eps=eps)


def unweighted(hidden_states: Tensor, eps: float) -> Tensor:
    """`op.unweighted`, within the limits of `standard`."""
    _check(hidden_states, None)
    return rmsnorm(hidden_states, eps=eps)
