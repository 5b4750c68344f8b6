"""The scan of Mamba-1, the variant per_channel: each value of a state [N] of a channel has its own decay.

With d the step sizes, h = exp(d A) h + d x B and out = h C + D x. Chunks are computed in parallel: a kernel computes
what each adds to a state, exp(A * sum of d) S + added, one walks along each document with the states, and one computes
the outputs from the states that arrive. In these, a tile has the tokens of a chunk and some channels, and there is a
loop over the values of a state, so that a warp has all tokens of its channels and scans them in registers. No tensor
has tokens, channels and values.

Strides are not specialized on, so that the compiler assumes no alignment of channels: it would load several at a
time, and have the tokens of a channel in several threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from opslot._base.jit import downcast
from opslot._base.kernel_launch import KernelLauncher, cdiv
from opslot.ops._common.arguments import are_given
from opslot.ops._common.kernels.chunks import chunk_table
from opslot.ops._common.kernels.tiles import load_segment
from opslot.ops.mamba_chunk_scan.kernels.call import ScanInputs
from opslot.ops.mamba_chunk_scan.kernels.steps import unlimited_step

LOG2_E = tl.constexpr(1.4426950408889634)

STRIDES = [
    "out_token",
    "x_token",
    "dt_token",
    *(f"{name}_{dim}" for name in ("B", "C") for dim in ("token", "group", "state")),
]


# Sizes whose tiles fit into registers; not measured. Tokens of a chunk: a thread has all tokens of a channel in
# registers, of several tiles in backward.
FORWARD_CHUNK, BACKWARD_CHUNK = 32, 16
# Channels of a tile: one warp has one each.
CHANNELS = 32
# Elements of a state per program of the walk along chunks, and its pipeline stages.
_WALKED, _WALK_STAGES = 256, 4


@dataclass(frozen=True)
class SelectiveCall(ScanInputs):
    """The inputs of Mamba-1: x [T, channels] with adjacent channels, A [channels, N], and B and C [T, groups, N] with
    any strides.
    """

    chunk: int

    @property
    def channels(self) -> int:
        return self.x.shape[1]

    @property
    def state(self) -> int:
        return self.B.shape[2]

    @property
    def group(self) -> int:
        """Channels of a group."""
        return self.x.shape[1] // self.B.shape[1]

    @property
    def blocks(self) -> int:
        """Tiles of the channels of a group."""
        return cdiv(self.group, CHANNELS)

    @property
    def grid(self) -> tuple[int, int, int]:
        return self.chunks.count * self.B.shape[1] * self.blocks, 1, 1

    @property
    def strides(self) -> tuple[int, ...]:
        return self.x.stride(0), self.dt.stride(0), *self.B.stride(), *self.C.stride()

    @property
    def sizes(self) -> tuple[Any, ...]:
        """The first constants of the kernels over all chunks."""
        bias = self.dt_bias is not None
        return self.channels, self.group, self.state, bias, self.softplus, CHANNELS, self.chunk

    def by_chunk(self, *shape: int) -> Tensor:
        """Uninitialized float32 [chunks, *shape, channels]."""
        return self.x.new_empty((self.chunks.count, *shape, self.channels), dtype=torch.float32)


def as_channels(x: Tensor) -> Tensor:
    """[B, S, channels] or [B, S, channels, 1] as [B * S, channels] with adjacent channels."""
    rows = x.reshape(-1, x.shape[2])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def prepare(
    inputs: Sequence[Any], cu_seqlens: Tensor | None, softplus: bool, low: float, high: float, backward: bool
) -> SelectiveCall:
    """`inputs` are x, dt, A, B, C, D and dt_bias; the last two may be None."""
    chunk = BACKWARD_CHUNK if backward else FORWARD_CHUNK
    x, dt, A, B, C, D, dt_bias = inputs
    batch, length = x.shape[:2]
    return SelectiveCall(
        x=as_channels(x),
        dt=as_channels(dt),
        A=A.contiguous(),
        B=B.reshape(-1, *B.shape[2:]),
        C=C.reshape(-1, *C.shape[2:]),
        D=None if D is None else D.contiguous(),
        dt_bias=None if dt_bias is None else dt_bias.contiguous(),
        softplus=softplus,
        limit=(low, high),
        chunks=chunk_table(cu_seqlens, batch, length, x.device, chunk),
        chunk=chunk,
    )


@triton.jit
def token_of(x, token: tl.constexpr, CHUNK: tl.constexpr):
    """Row of [CHUNK, channels]. A thread has all rows, so this compiles to the name of a register."""
    return tl.sum(tl.where((tl.arange(0, CHUNK) == token)[:, None], x, 0.0), 0)


@triton.jit
def with_token(x, row, token: tl.constexpr, CHUNK: tl.constexpr):
    """[CHUNK, channels] with another row."""
    return tl.where((tl.arange(0, CHUNK) == token)[:, None], row[None, :], x)


@triton.jit
def scan_tokens(decay, added, state, CHUNK: tl.constexpr):
    """States after each token, h = decay h + added, [CHUNK, channels], from `state`."""
    states = tl.zeros_like(added)
    for token in tl.static_range(CHUNK):
        state = state * token_of(decay, token, CHUNK) + token_of(added, token, CHUNK)
        states = with_token(states, state, token, CHUNK)
    return states


@triton.jit
def load_channels(ptr, start, length, channel, inside, token_stride, CHUNK: tl.constexpr):
    """float32 [CHUNK, channels] of [T, channels]; zero behind `length` tokens and outside `inside`."""
    i = tl.arange(0, CHUNK)
    offset = (start + i).to(tl.int64)[:, None] * token_stride + channel[None, :]
    return tl.load(ptr + offset, mask=(i < length)[:, None] & inside[None, :], other=0.0).to(tl.float32)


@triton.jit
def load_value(ptr, start, length, group, n, token_stride, group_stride, state_stride, CHUNK: tl.constexpr):
    """float32 [CHUNK, 1] of value `n` of one group of [T, groups, N]."""
    i = tl.arange(0, CHUNK)
    offset = (start + i).to(tl.int64) * token_stride + group * group_stride + n * state_stride
    return tl.load(ptr + offset, mask=i < length, other=0.0).to(tl.float32)[:, None]


@triton.jit
def load_raw_steps(
    dt_ptr,
    bias_ptr,
    start,
    length,
    channel,
    inside,
    dt_token,
    HAS_BIAS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """dt + dt_bias, [CHUNK, channels]."""
    raw = load_channels(dt_ptr, start, length, channel, inside, dt_token, CHUNK)
    if HAS_BIAS:
        raw += tl.load(bias_ptr + channel, mask=inside, other=0.0).to(tl.float32)[None, :]
    return raw


@triton.jit
def steps_of(raw, length, low, high, SOFTPLUS: tl.constexpr, CHUNK: tl.constexpr):
    """Step sizes [CHUNK, channels]; 0 behind `length` tokens, which then keep the state."""
    step = tl.minimum(tl.maximum(unlimited_step(raw, SOFTPLUS), low), high)
    return tl.where((tl.arange(0, CHUNK) < length)[:, None], step, 0.0)


@triton.jit
def channels_of_program(HEADS: tl.constexpr, GROUP: tl.constexpr, CHANNELS: tl.constexpr):
    """Chunk, group, block of the group's channels, these channels, and which of them there are."""
    BLOCKS: tl.constexpr = (GROUP + CHANNELS - 1) // CHANNELS
    GROUPS: tl.constexpr = HEADS // GROUP
    chunk = tl.program_id(0) // (BLOCKS * GROUPS)
    group = tl.program_id(0) // BLOCKS % GROUPS
    block = tl.program_id(0) % BLOCKS
    within = block * CHANNELS + tl.arange(0, CHANNELS)
    return chunk, group, block, group * GROUP + within, within < GROUP


@triton.jit(do_not_specialize=STRIDES[1:])
def added_kernel(
    x_ptr,
    dt_ptr,
    A_ptr,
    B_ptr,
    C_ptr,
    bias_ptr,
    start_ptr,
    length_ptr,
    states_ptr,
    total_ptr,
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
    BACKWARD: tl.constexpr,
):
    """What each chunk adds to a state [chunks, N, HEADS], and the sum of its step sizes [chunks, HEADS].

    With BACKWARD, x is dout, and what is added to the gradient of the state that arrives at the chunk.
    """
    chunk, group, _, channel, inside = channels_of_program(HEADS, GROUP, CHANNELS)
    start = tl.load(start_ptr + chunk)
    length = tl.load(length_ptr + chunk)
    if length > 0:
        raw = load_raw_steps(dt_ptr, bias_ptr, start, length, channel, inside, dt_token, HAS_BIAS, CHUNK)
        step = steps_of(raw, length, low, high, SOFTPLUS, CHUNK)
        x = load_channels(x_ptr, start, length, channel, inside, x_token, CHUNK)
        total = tl.sum(step, 0)
        between = tl.cumsum(step, 0)
        if not BACKWARD:
            between = total[None, :] - between
            x *= step
        tl.store(total_ptr + chunk.to(tl.int64) * HEADS + channel, total, mask=inside)
        states = states_ptr + chunk.to(tl.int64) * (N * HEADS) + channel
        for n in range(N):
            rate = tl.load(A_ptr + channel * N + n, mask=inside, other=0.0).to(tl.float32) * LOG2_E
            if BACKWARD:
                value = load_value(C_ptr, start, length, group, n, C_token, C_group, C_state, CHUNK)
            else:
                value = load_value(B_ptr, start, length, group, n, B_token, B_group, B_state, CHUNK)
            added = tl.sum(tl.exp2(rate[None, :] * between) * (x * value), 0)
            tl.store(states + n * HEADS, added, mask=inside)


@triton.jit
def walk_kernel(
    A_ptr,
    total_ptr,
    cu_seqlens_ptr,
    first_chunk_ptr,
    given_ptr,
    states_ptr,
    end_ptr,
    HEADS: tl.constexpr,
    N: tl.constexpr,
    CHUNK: tl.constexpr,
    BACKWARD: tl.constexpr,
    HAS_GIVEN: tl.constexpr,
    WANT_END: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Replace what each chunk adds by the state that arrives at it; backward by the gradient of the one that leaves it.

    States that arrive at and leave documents are [documents, HEADS, N].
    """
    document = tl.program_id(0)
    _, _, first, count = load_segment(cu_seqlens_ptr, first_chunk_ptr, document, 0, 1, CHUNK)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = element < N * HEADS
    channel = element % HEADS
    of_document = document.to(tl.int64) * (N * HEADS) + channel * N + element // HEADS
    rate = tl.load(A_ptr + channel * N + element // HEADS, mask=inside, other=0.0).to(tl.float32) * LOG2_E
    state = tl.zeros((BLOCK,), dtype=tl.float32)
    if HAS_GIVEN:
        state += tl.load(given_ptr + of_document, mask=inside, other=0.0).to(tl.float32)
    for iteration in tl.range(0, count, num_stages=STAGES):
        chunk = (first + (count - 1 - iteration if BACKWARD else iteration)).to(tl.int64)
        total = tl.load(total_ptr + chunk * HEADS + channel, mask=inside, other=0.0)
        added = tl.load(states_ptr + chunk * (N * HEADS) + element, mask=inside, other=0.0)
        tl.store(states_ptr + chunk * (N * HEADS) + element, state, mask=inside)
        state = tl.exp2(rate * total) * state + added
    if WANT_END:
        tl.store(end_ptr + of_document, downcast(state, end_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=STRIDES)
def selective_outputs_kernel(
    x_ptr,
    dt_ptr,
    A_ptr,
    B_ptr,
    C_ptr,
    D_ptr,
    bias_ptr,
    start_ptr,
    length_ptr,
    states_ptr,
    out_ptr,
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
):
    """out [T, HEADS] from the states that arrive at each chunk."""
    chunk, group, _, channel, inside = channels_of_program(HEADS, GROUP, CHANNELS)
    start = tl.load(start_ptr + chunk)
    length = tl.load(length_ptr + chunk)
    if length > 0:
        i = tl.arange(0, CHUNK)
        raw = load_raw_steps(dt_ptr, bias_ptr, start, length, channel, inside, dt_token, HAS_BIAS, CHUNK)
        step = steps_of(raw, length, low, high, SOFTPLUS, CHUNK)
        x = load_channels(x_ptr, start, length, channel, inside, x_token, CHUNK)
        out = tl.zeros((CHUNK, CHANNELS), dtype=tl.float32)
        if HAS_D:
            out += x * tl.load(D_ptr + channel, mask=inside, other=0.0).to(tl.float32)[None, :]
        x *= step
        states = states_ptr + chunk.to(tl.int64) * (N * HEADS) + channel
        for n in range(N):
            rate = tl.load(A_ptr + channel * N + n, mask=inside, other=0.0).to(tl.float32) * LOG2_E
            state = tl.load(states + n * HEADS, mask=inside, other=0.0)
            write = load_value(B_ptr, start, length, group, n, B_token, B_group, B_state, CHUNK)
            read = load_value(C_ptr, start, length, group, n, C_token, C_group, C_state, CHUNK)
            decay = tl.exp2(rate[None, :] * step)
            out += scan_tokens(decay, x * write, state, CHUNK) * read
        offset = (start + i).to(tl.int64)[:, None] * out_token + channel[None, :]
        tl.store(
            out_ptr + offset,
            downcast(out, out_ptr.dtype.element_ty),
            mask=(i < length)[:, None] & inside[None, :],
        )


_launch_added = KernelLauncher(added_kernel)
_launch_walk = KernelLauncher(walk_kernel)
_launch_outputs = KernelLauncher(selective_outputs_kernel)


def walk(call: SelectiveCall, x: Tensor, given: Tensor | None, end: Tensor | None, backward: bool = False) -> Tensor:
    """The states that arrive at chunks, backward the gradients of those that leave them, float32 [chunks, N, channels].

    Args:
        x: [T, channels]; backward dout.
        given: the states that arrive at the documents, or the gradients of those that leave them; zeros without.
        end: filled with what leaves each document.
    """
    states, total = call.by_chunk(call.state), call.by_chunk()
    _launch_added(
        call.grid,
        (x, call.dt, call.A, call.B, call.C, call.dt_bias, *call.chunks.table, states, total),
        (),
        (x.stride(0), *call.strides[1:], *call.limit),
        (*call.sizes, backward),
        1,
    )
    _launch_walk(
        (call.chunks.documents, cdiv(call.state * call.channels, _WALKED), 1),
        (
            *(call.A, total, *call.chunks.bounds),
            *(None if given is None else given.contiguous(), states, end),
        ),
        (),
        (),
        (call.channels, call.state, call.chunk, backward, *are_given(given, end), _WALKED, _WALK_STAGES),
        4,
    )
    return states


def write_output(call: SelectiveCall, states: Tensor, out: Tensor) -> None:
    """Fill `out` [B, S, channels, 1]."""
    _launch_outputs(
        call.grid,
        (call.x, call.dt, call.A, call.B, call.C, call.D, call.dt_bias, *call.chunks.table, states, out),
        (),
        (call.channels, *call.strides, *call.limit),
        (*call.sizes, call.D is not None),
        1,
    )
