"""Step sizes of all tokens, and the log decay that they cumulate within a chunk."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from opslot._base.kernel_launch import KernelLauncher, cdiv
from opslot.ops.mamba_chunk_scan.kernels.call import ScanCall

_HEADS = 16


@triton.jit
def unlimited_step(raw, SOFTPLUS: tl.constexpr):
    """softplus(raw), or raw: the step size before it is limited."""
    if SOFTPLUS:
        small = tl.exp(-tl.abs(raw))
        # log(1 + small) without the rounding of 1 + small.
        above = 1.0 + small
        quotient = small / tl.where(above == 1.0, 1.0, above - 1.0)
        raw = tl.maximum(raw, 0.0) + tl.where(above == 1.0, small, tl.log(above) * quotient)
    return raw


@triton.jit
def steps_kernel(
    dt_ptr,
    A_ptr,
    bias_ptr,
    start_ptr,
    length_ptr,
    step_ptr,
    cumulated_ptr,
    dt_token,
    low,
    high,
    HEADS: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Step sizes and sums of the log decay, [chunks * heads, CHUNK]; a step is 0 after the chunk's last token."""
    chunk = tl.program_id(0)
    start = tl.load(start_ptr + chunk)
    length = tl.load(length_ptr + chunk)
    i = tl.arange(0, CHUNK)
    head = tl.program_id(1) * BH + tl.arange(0, BH)
    inside = head < HEADS
    valid = (i < length)[:, None] & inside[None, :]
    offset = (start + i).to(tl.int64)[:, None] * dt_token + head[None, :]
    raw = tl.load(dt_ptr + offset, mask=valid, other=0.0).to(tl.float32)
    if HAS_BIAS:
        raw += tl.load(bias_ptr + head, mask=inside, other=0.0).to(tl.float32)[None, :]
    step = tl.minimum(tl.maximum(unlimited_step(raw, SOFTPLUS), low), high)
    step = tl.where(valid, step, 0.0)
    decay_rate = tl.load(A_ptr + head, mask=inside, other=0.0).to(tl.float32)
    target = (chunk.to(tl.int64) * HEADS + head)[None, :] * CHUNK + i[:, None]
    tl.store(step_ptr + target, step, mask=inside[None, :] & (i >= 0)[:, None])
    cumulated = tl.cumsum(step * decay_rate[None, :], 0)
    tl.store(cumulated_ptr + target, cumulated, mask=inside[None, :] & (i >= 0)[:, None])


_launch_steps = KernelLauncher(steps_kernel)


def cumulate(call: ScanCall) -> tuple[Tensor, Tensor]:
    """Step sizes and cumulated log decay of each chunk, float32 [chunks * heads, CHUNK]."""
    step, cumulated = (call.by_chunk(call.plan.chunk, dtype=torch.float32) for _ in range(2))
    _launch_steps(
        (call.chunks.count, cdiv(call.heads, _HEADS), 1),
        (call.dt, call.A, call.dt_bias, *call.chunks.table, step, cumulated),
        (call.dt.stride(0),),
        call.limit,
        (call.heads, call.softplus, call.dt_bias is not None, _HEADS, call.plan.chunk),
        4,
    )
    return step, cumulated
