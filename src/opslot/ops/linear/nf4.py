"""Weights in NF4 (QLoRA, Dettmers et al. 2023), quantized by bitsandbytes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.no_grad()
def dequantize(packed: Any) -> Tensor:
    """The weight that `packed`, bitsandbytes' Params4bit, holds."""
    data, state = packed.data, packed.quant_state
    if data.device.type == "cuda":
        from bitsandbytes.functional import dequantize_4bit

        return dequantize_4bit(data, state)
    # bitsandbytes' own code for CPUs is wrong for rows that do not consist of whole blocks.
    scales = state.absmax
    if state.nested:
        inner = state.state2
        scales = inner.code[scales.int()] * _repeated(inner.absmax, inner.blocksize, len(scales)) + state.offset
    count = state.shape.numel()
    indices = torch.stack((data.view(-1) >> 4, data.view(-1) & 15), -1).view(-1)[:count].int()
    return (state.code[indices] * _repeated(scales, state.blocksize, count)).to(state.dtype).view(state.shape)


def _repeated(scales: Tensor, times: int, count: int) -> Tensor:
    return scales.repeat_interleave(times)[:count]
