"""Bits of the keys that each query sees, from bits of the pools of keys that an indexer selects."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from opslot._base.kernel_launch import KernelLauncher, cdiv

_WORDS = 32


@triton.jit(do_not_specialize=["heads", "queries", "keys", "pool_words", "words"])
def _expand_kernel(
    pool_bits_ptr,
    pool_ptr,
    start_ptr,
    end_ptr,
    tail_ptr,
    bits_ptr,
    pool_stride,
    seen_stride,
    heads,
    queries,
    keys,
    pool_words,
    words,
    TAIL: tl.constexpr,
    WORDS: tl.constexpr,
):
    """WORDS words of the keys that a query sees."""
    row = tl.program_id(0).to(tl.int64)
    b = row // queries // heads
    query = b * seen_stride + row % queries
    start, end = tl.load(start_ptr + query), tl.load(end_ptr + query)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    key = word[:, None] * 32 + tl.arange(0, 32)[None, :]
    seen = (key >= start) & (key < end) & (key < keys)
    pool = tl.load(pool_ptr + b * pool_stride + key, mask=seen, other=-2)
    in_pool = seen & (pool >= 0)
    found = tl.load(pool_bits_ptr + row * pool_words + pool // 32, mask=in_pool, other=0)
    chosen = in_pool & (((found >> (pool % 32)) & 1) != 0)
    if TAIL:
        chosen = chosen | (seen & (pool > -2) & (key >= tl.load(tail_ptr + query)))
    bits = tl.sum(chosen.to(tl.int32) << tl.arange(0, 32)[None, :], 1).to(tl.int32)
    tl.store(bits_ptr + row * words + word, bits, mask=word < words)


_launch = KernelLauncher(_expand_kernel)


def expand_pools(pool_bits: Tensor, pools: Tensor, seen: Tensor, tail: Tensor | None, bits: Tensor) -> None:
    """Write what `eager_expand_pools` of `bits.py` returns to `bits`; `bits` and `pool_bits` are contiguous."""
    batch, heads, queries, words = bits.shape
    if bits.numel() == 0:
        return
    pools, seen = pools.contiguous(), seen.contiguous()
    strides = (0 if pools.shape[0] == 1 else pools.shape[1], 0 if seen.shape[1] == 1 else queries)
    _launch(
        (batch * heads * queries, cdiv(words, _WORDS), 1),
        (pool_bits, pools, seen[0], seen[1], seen if tail is None else tail.contiguous(), bits),
        strides,
        (heads, queries, pools.shape[1], pool_bits.shape[3], words),
        (tail is not None, _WORDS),
        4,
    )
