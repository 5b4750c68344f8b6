"""Checks of the arguments that the kernels of layer_norm share."""

from __future__ import annotations

import torch
from torch import Tensor

from opslot.ops._common.arguments import reject, require_floats
from opslot.ops.layer_norm.op import MAX_WIDTH


def checked(kernel: str, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> torch.dtype:
    """The dtype of the output.

    Args:
        kernel: its configuration, for errors.

    Raises:
        KernelError: unsupported shapes or dtypes.
    """
    width = x.shape[-1] if x.dim() else 0
    require_floats(kernel, hidden_states=x, weight=weight, bias=bias)
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.shape != (width,):
            reject(kernel, name, f"its shape is {tuple(tensor.shape)}, not ({width},)", "use eager")
    if width > MAX_WIDTH:
        reject(kernel, "hidden_states", f"its rows have {width} elements, more than {MAX_WIDTH}", "use eager")
    if x.is_cuda and torch.is_autocast_enabled("cuda"):
        return torch.float32
    return x.dtype
