"""Triton kernel that dequantizes NF4 weights (QLoRA, Dettmers et al. 2023) in one launch, as bitsandbytes stores them.

A weight is a row of 4-bit indices into 16 values, two in a byte, the first in the high bits. The values of a block are
multiplied by its scale. Scales are float32, or quantized themselves: an 8-bit index into 256 values, times the float32
scale of a block of scales, plus an offset.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from opslot._base.jit import downcast
from opslot._base.kernel_launch import KernelLauncher, cdiv

# Bytes that a program reads.
_BYTES = 2048
_WARPS = 4


def dequantize(packed: Tensor, state: Any, block_bytes: int = _BYTES, warps: int = _WARPS) -> Tensor:
    """The weight of `packed` in `state.shape` and `state.dtype`, bit for bit that of bitsandbytes' dequantize_4bit.

    Args:
        packed: [N / 2, 1] uint8, contiguous.
        state: bitsandbytes' QuantState of type nf4.
    """
    out = torch.empty(state.shape, dtype=state.dtype, device=packed.device)
    count, half = out.numel(), state.blocksize // 2
    if not count:
        return out
    rows = max(1, block_bytes // half)
    scales = (None, None, None, 0)
    if state.nested:
        inner = state.state2
        scales = (inner.code, inner.absmax, state.offset, inner.blocksize)
    _launcher(
        (cdiv(cdiv(count, state.blocksize), rows), 1, 1),
        (packed, state.absmax, state.code, *scales[:3], out),
        (),
        (count,),
        (rows, half, scales[3]),
        warps,
    )
    return out


@triton.jit(do_not_specialize=["count"])
def _dequantize_kernel(
    packed,
    absmax,
    code,
    scale_code,
    scale_absmax,
    offset,
    out,
    count,
    ROWS: tl.constexpr,
    HALF: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
):
    """ROWS blocks of HALF bytes; SCALE_BLOCK is the number of scales in a block of scales, 0 if they are float32."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    in_rows = row * (2 * HALF) < count
    scale = tl.load(absmax + row, mask=in_rows, other=0)
    if SCALE_BLOCK:
        # Multiplication and addition round, as they do in two kernels: see `_launcher`.
        value = tl.load(scale_code + scale.to(tl.int32))
        scale = value * tl.load(scale_absmax + row // SCALE_BLOCK, mask=in_rows, other=0.0)
        scale += tl.load(offset)
    at = row[:, None] * HALF + tl.arange(0, HALF)[None, :]
    byte = tl.load(packed + at, mask=2 * at < count, other=0).to(tl.int32)
    pair = tl.join(tl.load(code + (byte >> 4)), tl.load(code + (byte & 15)))
    values = tl.reshape(pair, (ROWS, 2 * HALF)) * scale[:, None]
    at = row[:, None] * (2 * HALF) + tl.arange(0, 2 * HALF)[None, :]
    tl.store(out + at, downcast(values, out.dtype.element_ty), mask=at < count)


# A fused multiply-add would round once.
_launcher = KernelLauncher(_dequantize_kernel, enable_fp_fusion=False)
