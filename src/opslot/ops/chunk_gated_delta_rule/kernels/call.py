"""Arguments of a call in the kernels' layout, and block sizes."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from opslot.ops.chunk_gated_delta_rule.kernels.chunks import CHUNK, Chunks, chunk_table
from opslot.ops.chunk_gated_delta_rule.kernels.norm import normalized


@dataclass(frozen=True)
class ChunkTiling:
    """Block sizes.

    Attributes:
        key: key size rounded up to a power of two.
        key_block, value_block: block of columns of the kernels over all chunks.
        grad_block: block of value columns of the last two kernels of backward.
        state_block: columns of a state per program of the recurrence.
        stages: pipeline stages of the recurrence.
    """

    key: int
    key_block: int
    value_block: int
    grad_block: int
    state_block: int
    stages: int


@functools.cache
def plan_for(key: int, value: int, element_bytes: int) -> ChunkTiling:
    """Chosen from ptxas' registers and shared memory on Hopper, not measured.

    The recurrence is bound by its chain of small matmuls, so blocks are small: values of size 128 have four programs
    per head. The last kernels of backward have three accumulators; 64 value columns would double the register spills.
    """
    key_full, value_full = (max(16, triton.next_power_of_2(n)) for n in (key, value))
    most = 64 if element_bytes == 2 else 32
    narrow_state = element_bytes > 2 or key_full > 128
    return ChunkTiling(
        key=key_full,
        key_block=min(most, key_full),
        value_block=min(most, value_full),
        grad_block=min(32, value_full),
        state_block=min(16 if narrow_state else 32, value_full),
        stages=1 if element_bytes > 2 else 2,
    )


@dataclass(frozen=True)
class Call:
    """Inputs of forward and backward.

    Attributes:
        raw_q, raw_k, v: tokens [T, heads, width], T over all rows of the batch.
        q, k: raw_q and raw_k, normalized if requested.
        log_decay, rate: [T, V_heads].
    """

    raw_q: Tensor
    raw_k: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    rate: Tensor
    chunks: Chunks
    plan: ChunkTiling

    @property
    def heads(self) -> int:
        """Value heads."""
        return self.v.shape[1]

    @property
    def group(self) -> int:
        """Value heads per key head."""
        return self.v.shape[1] // self.k.shape[1]

    @property
    def key(self) -> int:
        """Width of a key."""
        return self.k.shape[2]

    @property
    def value(self) -> int:
        """Width of a value."""
        return self.v.shape[2]

    @property
    def scale(self) -> float:
        return self.key**-0.5

    @property
    def per_chunk(self) -> int:
        """Programs of a kernel over all chunks and value heads."""
        return self.chunks.count * self.heads

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """The first constants of most kernels."""
        return self.heads, self.group, self.key, self.value

    def blocks(self, value_block: int) -> tuple[int, int, int]:
        """The last constants of a kernel over all chunks."""
        return self.plan.key_block, value_block, CHUNK

    def by_chunk(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Uninitialized [chunks * V_heads, *shape], in the arguments' dtype unless another is named."""
        return self.k.new_empty((self.per_chunk, *shape), dtype=dtype)


def prepare(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor | None, normalize: bool
) -> Call:
    raw_q, raw_k = as_tokens(query), as_tokens(key)
    batch, length = value.shape[:2]
    q, k = (normalized(x) if normalize else x for x in (raw_q, raw_k))
    return Call(
        raw_q=raw_q,
        raw_k=raw_k,
        q=q,
        k=k,
        v=as_tokens(value),
        log_decay=_scalars(g),
        rate=_scalars(beta),
        chunks=chunk_table(cu_seqlens, batch, length, value.device),
        plan=plan_for(key.shape[3], value.shape[3], key.element_size()),
    )


def as_tokens(x: Tensor) -> Tensor:
    """[B, S, heads, width] as [B * S, heads, width] with adjacent columns: a view where the strides have one."""
    rows = x.reshape(-1, *x.shape[2:])
    return rows if rows.stride(2) == 1 else rows.contiguous()


def _scalars(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[2]).contiguous()


def strides(*tensors: Tensor) -> tuple[int, ...]:
    """Token and head strides of each tensor [T, heads, width]."""
    return tuple(stride for x in tensors for stride in x.stride()[:2])
