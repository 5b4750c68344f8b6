"""The gradients of Mamba-1's scan.

With the symbols of `selective.py`, S' the gradient of the state that leaves a chunk, and g that of the state after each
token: g = C dout + exp(d A) of the next token * g of the next token, from S'. Summed over the values of a state,

    dx = d (g B) + D dout,  dd = x (g B) + (g exp(d A) h_before) A

and summed over tokens dA = g exp(d A) h_before d, and over channels dB = g d x, dC = h dout. exp(d A) h_before is
h - d x B.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from opslot._base.jit import downcast
from opslot._base.kernel_launch import KernelLauncher
from opslot.ops._common.kernels.tiles import FP32_DOT
from opslot.ops._common.triton_activations import is_below_limit
from opslot.ops.mamba_chunk_scan.kernels.selective import (
    LOG2_E,
    STRIDES,
    SelectiveCall,
    channels_of_program,
    load_channels,
    load_raw_steps,
    load_value,
    scan_tokens,
    steps_of,
    token_of,
    with_token,
)
from opslot.ops.mamba_chunk_scan.kernels.steps import unlimited_step

# Columns of dB and dC that are accumulated together.
_BLOCK = 16


@triton.jit
def scan_gradients(decay, added, last, CHUNK: tl.constexpr):
    """Gradients of the states after each token, added + decay of the next token * gradient after it, from `last`."""
    gradients = tl.zeros_like(added)
    for step in tl.static_range(CHUNK):
        last += token_of(added, CHUNK - 1 - step, CHUNK)
        gradients = with_token(gradients, last, CHUNK - 1 - step, CHUNK)
        last *= token_of(decay, CHUNK - 1 - step, CHUNK)
    return gradients


@triton.jit(do_not_specialize=["dout_token", "part_size", *STRIDES])
def selective_gradients_kernel(
    x_ptr,
    dt_ptr,
    A_ptr,
    B_ptr,
    C_ptr,
    D_ptr,
    bias_ptr,
    dout_ptr,
    start_ptr,
    length_ptr,
    states_ptr,
    dstates_ptr,
    dx_ptr,
    ddt_ptr,
    dB_ptr,
    dC_ptr,
    sums_ptr,
    dout_token,
    part_size,
    out_token,
    x_token,
    dt_token,
    B_token,
    B_group,
    B_state,
    C_token,
    C_group,
    C_state,
    low,
    high,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    N: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    CHANNELS: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_D: tl.constexpr,
    BN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dx and ddt [T, HEADS]; of each chunk, the sums of dD and ddt [chunks, 2, HEADS]; parts of dB and dC.

    Parts are [blocks, T, groups, N]. Replaces S' of each chunk by its part of dA.
    """
    chunk, group, block, channel, inside = channels_of_program(HEADS, GROUP, CHANNELS)
    start = tl.load(start_ptr + chunk)
    length = tl.load(length_ptr + chunk)
    states_ptr += chunk.to(tl.int64) * (N * HEADS) + channel
    dstates_ptr += chunk.to(tl.int64) * (N * HEADS) + channel
    sums_ptr += chunk.to(tl.int64) * (2 * HEADS) + channel
    if length == 0:
        for n in range(N):
            tl.store(dstates_ptr + n * HEADS, tl.zeros((CHANNELS,), dtype=tl.float32), mask=inside)
        tl.store(sums_ptr, tl.zeros((CHANNELS,), dtype=tl.float32), mask=inside)
        tl.store(sums_ptr + HEADS, tl.zeros((CHANNELS,), dtype=tl.float32), mask=inside)
    else:
        i = tl.arange(0, CHUNK)
        raw = load_raw_steps(dt_ptr, bias_ptr, start, length, channel, inside, dt_token, HAS_BIAS, CHUNK)
        step = steps_of(raw, length, low, high, SOFTPLUS, CHUNK)
        x = load_channels(x_ptr, start, length, channel, inside, x_token, CHUNK)
        dout = load_channels(dout_ptr, start, length, channel, inside, dout_token, CHUNK)
        # g B and the gradient of the decays.
        written = tl.zeros((CHUNK, CHANNELS), dtype=tl.float32)
        dstep = tl.zeros((CHUNK, CHANNELS), dtype=tl.float32)
        token = (start + i).to(tl.int64) * (HEADS // GROUP) + group
        for first in range(0, N, BN):
            value = first + tl.arange(0, BN)
            dB = tl.zeros((CHUNK, BN), dtype=tl.float32)
            dC = tl.zeros((CHUNK, BN), dtype=tl.float32)
            for n in range(first, tl.minimum(first + BN, N)):
                rate = tl.load(A_ptr + channel * N + n, mask=inside, other=0.0).to(tl.float32)
                state = tl.load(states_ptr + n * HEADS, mask=inside, other=0.0)
                dstate = tl.load(dstates_ptr + n * HEADS, mask=inside, other=0.0)
                write = load_value(B_ptr, start, length, group, n, B_token, B_group, B_state, CHUNK)
                read = load_value(C_ptr, start, length, group, n, C_token, C_group, C_state, CHUNK)
                decay = tl.exp2((rate * LOG2_E)[None, :] * step)
                added = x * step * write
                states = scan_tokens(decay, added, state, CHUNK)
                gradients = scan_gradients(decay, dout * read, dstate, CHUNK)
                # The tensor cores sum over channels, and add to column n.
                column = tl.where(value[None, :] == n, 1.0, 0.0) + tl.zeros((CHANNELS, 1), dtype=tl.float32)
                dC = tl.dot(states * dout, column, dC, input_precision=PRECISION)
                dB = tl.dot(gradients * (x * step), column, dB, input_precision=PRECISION)
                written += gradients * write
                ddecay = gradients * (states - added)
                dstep += ddecay * rate[None, :]
                tl.store(dstates_ptr + n * HEADS, tl.sum(ddecay * step, 0), mask=inside)
            offset = block.to(tl.int64) * part_size + token[:, None] * N + value[None, :]
            mask = (i < length)[:, None] & (value < N)[None, :]
            tl.store(dB_ptr + offset, dB, mask=mask)
            tl.store(dC_ptr + offset, dC, mask=mask)
        unlimited = unlimited_step(raw, SOFTPLUS)
        ddt = dstep + x * written
        if SOFTPLUS:
            ddt *= 1.0 / (1.0 + tl.exp(-raw))
        mask = (i < length)[:, None] & inside[None, :]
        ddt = tl.where(mask & is_below_limit(-unlimited, -low) & is_below_limit(unlimited, high), ddt, 0.0)
        offset = (start + i).to(tl.int64)[:, None] * out_token + channel[None, :]
        tl.store(ddt_ptr + offset, downcast(ddt, ddt_ptr.dtype.element_ty), mask=mask)
        tl.store(sums_ptr, tl.sum(x * dout, 0), mask=inside)
        tl.store(sums_ptr + HEADS, tl.sum(ddt, 0), mask=inside)
        dx = written * step
        if HAS_D:
            dx += dout * tl.load(D_ptr + channel, mask=inside, other=0.0).to(tl.float32)[None, :]
        tl.store(dx_ptr + offset, downcast(dx, dx_ptr.dtype.element_ty), mask=mask)


_launch_gradients = KernelLauncher(selective_gradients_kernel)


def write_gradients(
    call: SelectiveCall, dout: Tensor, states: Tensor, dstates: Tensor, grads: tuple[Tensor | None, ...]
) -> None:
    """Fill `grads` of x, dt, A, B, C, D and dt_bias; the last two may be None.

    Args:
        dout: [T, channels].
        states, dstates: what `walk` returns; `dstates` is overwritten.
    """
    dx, ddt, dA, dB, dC, dD, dbias = grads
    assert dA is not None
    assert dB is not None
    assert dC is not None
    parts = [x.new_empty((call.blocks, *x.shape), dtype=torch.float32) for x in (call.B, call.C)]
    sums = call.by_chunk(2)
    # Products of 16-bit gradients are rounded a second time before they are summed over channels.
    precision = "tf32" if call.x.element_size() == 2 and not torch.version.hip else FP32_DOT.value
    _launch_gradients(
        call.grid,
        (
            *(call.x, call.dt, call.A, call.B, call.C, call.D, call.dt_bias, dout, *call.chunks.table),
            *(states, dstates, dx, ddt, *parts, sums),
        ),
        (),
        (dout.stride(0), call.B.numel(), call.channels, *call.strides, *call.limit),
        (*call.sizes, call.D is not None, _BLOCK, precision),
        1,
    )
    dA.copy_(dstates.sum(0).t())
    dB.copy_(parts[0].sum(0).view(dB.shape))
    dC.copy_(parts[1].sum(0).view(dC.shape))
    for grad, total in zip((dD, dbias), sums.sum(0), strict=True):
        if grad is not None:
            grad.copy_(total)
