"""Arguments of a call in the kernels' layout, and block sizes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from opslot._base.kernel_launch import cdiv, shared_memory, sm_count
from opslot.ops._common.kernels.chunks import Chunks, chunk_table
from opslot.ops._common.kernels.tiles import as_tokens


@dataclass(frozen=True)
class ScanTiling:
    """Block sizes.

    Attributes:
        chunk: tokens of a chunk.
        head: width of a head rounded up to a power of two.
        rows, columns: block of a state per program along the chunks.
        read: columns of a state per step of the kernels over all chunks.
        shared: columns of B and C per program of their gradients.
        stages: pipeline stages of the loops over chunks and heads.
        walk_warps, out_warps, token_warps, shared_warps: warps of the kernels.
    """

    chunk: int
    head: int
    rows: int
    columns: int
    read: int
    shared: int
    stages: int
    walk_warps: int
    out_warps: int
    token_warps: int
    shared_warps: int


# Bytes of shared memory of the gradients of B and C with three stages, heads and states of 128.
_THREE_STAGES = 150 * 1024


@functools.cache
def plan_for(head: int, state: int, element_bytes: int, shared_bytes: int) -> ScanTiling:
    """Sizes whose accumulators fit into registers, and loads into shared memory; not measured.

    In 16 bit no tile has rows of less than 128 bytes. Narrower ones have another layout in shared memory, and ptxas
    12.8, which Triton 3.6 has, computes the descriptor of a matmul's operand from an uninitialized register where tiles
    of two layouts have the same address.

    Args:
        shared_bytes: of shared memory that one CTA can use.
    """
    half = element_bytes == 2
    head_full, state_full = (max(64 if half else 16, triton.next_power_of_2(n)) for n in (head, state))
    wide = head_full > 64
    return ScanTiling(
        chunk=64 if half else 32,
        head=head_full,
        rows=64 if half else min(32, head_full),
        columns=64 if half else min(32, state_full),
        read=64 if half else 16,
        shared=min(128 if half else 64, state_full),
        stages=(2 if wide and shared_bytes < _THREE_STAGES else 3) if half else 1,
        walk_warps=4,
        out_warps=8 if wide else 4,
        token_warps=8 if wide else 4,
        shared_warps=8 if wide else 4,
    )


@dataclass(frozen=True)
class ScanInputs:
    """Inputs of forward and backward, of heads or of channels.

    Attributes:
        x, B, C: tokens, T over all rows of the batch.
        dt: [T, heads] with adjacent columns.
        D, dt_bias: [heads].
        softplus, limit: how `dt` becomes the step size.
    """

    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None
    dt_bias: Tensor | None
    softplus: bool
    limit: tuple[float, float]
    chunks: Chunks


@dataclass(frozen=True)
class ScanCall(ScanInputs):
    """The inputs of Mamba-2: x, B and C [T, heads or groups, width], A [heads]."""

    plan: ScanTiling

    @property
    def heads(self) -> int:
        return self.x.shape[1]

    @property
    def groups(self) -> int:
        return self.B.shape[1]

    @property
    def group(self) -> int:
        """Heads per group."""
        return self.heads // self.groups

    @property
    def head(self) -> int:
        """Width of a head."""
        return self.x.shape[2]

    @property
    def state(self) -> int:
        """Width of a state."""
        return self.B.shape[2]

    @property
    def per_chunk(self) -> int:
        """Programs of a kernel over all chunks and heads."""
        return self.chunks.count * self.heads

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """The first constants of most kernels."""
        return self.heads, self.group, self.head, self.state

    @property
    def parts(self) -> int:
        """In how many parts to split the heads of a group where B's and C's gradients are summed over them."""
        programs = self.chunks.count * self.groups * cdiv(self.state, self.plan.shared)
        return max(1, min(self.group, 4 * sm_count(self.x.device) // max(programs, 1)))

    def by_chunk(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Uninitialized [chunks * heads, *shape], in the arguments' dtype unless another is named."""
        return self.x.new_empty((self.per_chunk, *shape), dtype=dtype)


def prepare(inputs: Sequence[Any], cu_seqlens: Tensor | None, softplus: bool, low: float, high: float) -> ScanCall:
    """`inputs` are x, dt, A, B, C, D and dt_bias; the last two may be None."""
    x, dt, A, B, C, D, dt_bias = inputs
    batch, length = x.shape[:2]
    plan = plan_for(x.shape[3], B.shape[3], x.element_size(), shared_memory(x.device))
    steps = dt.reshape(-1, dt.shape[2])
    return ScanCall(
        x=as_tokens(x),
        dt=steps if steps.stride(1) == 1 else steps.contiguous(),
        A=A.contiguous(),
        B=as_tokens(B),
        C=as_tokens(C),
        D=None if D is None else D.contiguous(),
        dt_bias=None if dt_bias is None else dt_bias.contiguous(),
        softplus=softplus,
        limit=(low, high),
        chunks=chunk_table(cu_seqlens, batch, length, x.device, plan.chunk),
        plan=plan,
    )
