"""Whether torch's own function is the better one for a call: few tokens, for which the host takes longer than the GPU.

A norm of torch is one call from C++ each way. On the host of an H200, a loop of forward and backward takes 0.09 to 0.16
ms with it and 0.18 to 0.32 with Triton's. Within these limits an RMSNorm of torch takes the GPU up to 0.034 ms longer:
of 8000 rows of 1024 elements 0.058 and 0.024 ms, of 65536 of 64, beyond them, 0.238 and 0.013.
"""

from __future__ import annotations

import torch
from torch import Tensor

from opslot.ops._common.specs import FLOATS

_FEW, _FEW_ROWS = 2**23, 2**13
# In wide layers, the GEMMs between the norms take the GPU longer than the host.
_FEW_TIMES_WIDTH = 2**34


def are_few_tokens(hidden_states: Tensor, *others: Tensor | None) -> bool:
    """For eager code outside of autocast, with `others` of the dtype of `hidden_states`.

    What Triton's kernels do not support is left to them, whatever the number of tokens: their errors say what to do.

    Args:
        hidden_states: [..., H].
    """
    # A compiled graph would be specialized on the number of tokens.
    if torch.compiler.is_compiling() or hidden_states.dim() == 0:
        return False
    size, width, dtype = hidden_states.numel(), hidden_states.shape[-1], hidden_states.dtype
    if dtype not in FLOATS or size >= _FEW or size > _FEW_ROWS * width or size * width > _FEW_TIMES_WIDTH:
        return False
    for other in others:
        if other is not None and (other.dtype != dtype or other.shape[-1:] != hidden_states.shape[-1:]):
            return False
    return not torch.is_autocast_enabled(hidden_states.device.type)
