"""Arguments of a call in the kernels' layout, and block sizes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from opslot._base.kernel_launch import cdiv, shared_memory, sm_count
from opslot.ops._common.kernels.chunks import Chunks, chunk_table
from opslot.ops._common.kernels.tiles import as_tokens

# Tokens of a chunk.
CHUNK = 64


@dataclass(frozen=True)
class ChunkTiling:
    """Block sizes.

    Attributes:
        key: key size rounded up to a power of two.
        key_block: block of key columns of the triangular system.
        state_block: value columns of a state per program of the recurrence.
        grad_block: block of value columns of the last kernel of backward.
        stages: pipeline stages of the recurrence and of the last kernel of backward.
        state_warps, grad_warps: warps of these.
        keys_last: backward's recurrence loads keys where it needs them, which takes less shared memory.
        value_block, system_warps, channel_warps: where channels have their own decay, the block of value columns of the
            gradients, and warps of the system and of the gradients.
    """

    key: int
    key_block: int
    state_block: int
    grad_block: int
    stages: int
    state_warps: int
    grad_warps: int
    keys_last: bool
    value_block: int
    system_warps: int
    channel_warps: int


# Bytes of shared memory of the recurrence with three stages, keys of 128 and decays of channels.
_THREE_STAGES = 162 * 1024
# The same of backward's recurrence in float32 with keys of 256, which it loads first, with Triton 3.6.
_KEYS_FIRST = 180 * 1024


@functools.cache
def plan_for(key: int, value: int, element_bytes: int, shared: int) -> ChunkTiling:
    """Measured on an H200 for bf16 and keys of 128 (benchmarks/tune_recurrence.py); others fit into shared memory.

    In the recurrence, two stages take 1.4 times as long as three, and 32 columns as long as 64. What only decays of
    channels have is not measured. In 16 bit, tiles of keys and of their decays are at least 64 columns wide: Triton 3.6
    miscompiles kernels that mix narrower ones with these (see mamba_chunk_scan).

    Args:
        shared: bytes of shared memory that one CTA can use.
    """
    half = element_bytes == 2
    key_full, value_full = (max(64 if half else 16, triton.next_power_of_2(n)) for n in (key, value))
    large = key_full > 128
    return ChunkTiling(
        key=key_full,
        key_block=min(64 if half else 32, key_full),
        state_block=min((32 if large else 64) if half else 16, value_full),
        grad_block=min(32 if half and not large else 16, value_full),
        stages=max(1, (2 if large else 3) - (shared < _THREE_STAGES)) if half else 1,
        state_warps=4,
        grad_warps=16 if large else 8,
        keys_last=not half and shared < _KEYS_FIRST,
        value_block=min(64 if half else 16, value_full),
        system_warps=4 if half else 8,
        channel_warps=8,
    )


# Splitting computes the states of all parts twice and each part's transition, so few parts are slower than none.
_LEAST_SEGMENTS = 4
_CHUNKS_PER_SEGMENT = 8
_WIDEST_SPLIT_KEY = 128


def segments_for(programs: int, chunks: int, key: int, sms: int) -> int:
    """In how many parts to split each document.

    Args:
        programs: of the recurrence without splitting.
        chunks: of a document, on average.
    """
    segments = min(sms // programs, chunks // _CHUNKS_PER_SEGMENT)
    return segments if segments >= _LEAST_SEGMENTS and key <= _WIDEST_SPLIT_KEY else 1


@dataclass(frozen=True)
class DeltaRuleCall:
    """Inputs of forward and backward.

    Attributes:
        q, k, v: tokens [T, heads, width], T over all rows of the batch.
        log_decay: [T, V_heads], or [T, V_heads, K] of the variant per_channel.
        rate: [T, V_heads].
        normalize: divide q and k by their norms.
        segments: parts of a document whose recurrences run in parallel.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    rate: Tensor
    normalize: bool
    chunks: Chunks
    plan: ChunkTiling
    segments: int

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
    def per_channel(self) -> bool:
        return self.log_decay.dim() == 3

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

    def by_chunk(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Uninitialized [chunks * V_heads, *shape], in the arguments' dtype unless another is named."""
        return self.k.new_empty((self.per_chunk, *shape), dtype=dtype)

    def by_segment(self, *shape: int) -> Tensor:
        """Uninitialized float32 [documents * segments * V_heads, *shape]."""
        return self.k.new_empty((self.chunks.documents * self.segments * self.heads, *shape), dtype=torch.float32)


def prepare(inputs: Sequence[Tensor], cu_seqlens: Tensor | None, normalize: bool) -> DeltaRuleCall:
    """`inputs` are query, key, value, g and beta."""
    query, key, value, g, beta = inputs
    batch, length = value.shape[:2]
    plan = plan_for(key.shape[3], value.shape[3], key.element_size(), shared_memory(key.device))
    chunks = chunk_table(cu_seqlens, batch, length, value.device, CHUNK)
    programs = chunks.documents * value.shape[2] * cdiv(value.shape[3], plan.state_block)
    return DeltaRuleCall(
        q=as_tokens(query),
        k=as_tokens(key),
        v=as_tokens(value),
        log_decay=as_tokens(g) if g.dim() == 4 else _scalars(g),
        rate=_scalars(beta),
        normalize=normalize,
        chunks=chunks,
        plan=plan,
        segments=segments_for(programs, chunks.count // chunks.documents, key.shape[3], sm_count(value.device)),
    )


def _scalars(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[2]).contiguous()
