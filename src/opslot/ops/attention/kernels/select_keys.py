"""The keys of the highest scores of each query, as bits; deterministic.

A program finds the k-th highest score of a query, bit by bit of its ordering as an integer, by counting. Of equal
scores there, the first keys are taken.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from opslot._base.kernel_launch import KernelLauncher

# Scores that a program keeps in registers; more are read again for each bit.
_BLOCK = 16384


@triton.jit
def _ordered(scores_ptr, key, keys):
    """Integers in the order of the scores of `key`; the lowest for scores of -inf, and past the last key."""
    score = tl.load(scores_ptr + key, mask=key < keys, other=float("-inf"))
    # 0 for -0.
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(score > float("-inf"), ordered, -2147483648)


@triton.jit(do_not_specialize=["keys", "top"])
def _select_kernel(
    scores_ptr,
    bits_ptr,
    scores_stride,
    bits_stride,
    keys,
    top,
    BLOCK: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    scores_ptr += row * scores_stride
    bits_ptr += row * bits_stride
    column = tl.arange(0, BLOCK)
    first = _ordered(scores_ptr, column, keys)
    count = tl.sum((first > -2147483648).to(tl.int32), 0)
    if not ONE_BLOCK:
        for start in tl.range(BLOCK, keys, BLOCK):
            count += tl.sum((_ordered(scores_ptr, start + column, keys) > -2147483648).to(tl.int32), 0)

    # All scores of a query with few keys are at least this threshold.
    threshold = tl.full((), -2147483647, dtype=tl.int32)
    above = tl.zeros((), dtype=tl.int32)
    if count > top:
        # The sign first: the highest threshold that `top` scores reach is built from its highest bit down.
        threshold = tl.full((), -2147483648, dtype=tl.int32)
        for i in tl.range(0, 32):
            # Adding the highest bit to the lowest integer gives 0.
            candidate = threshold ^ (tl.full((), 1, dtype=tl.int32) << (31 - i))
            reached = tl.sum((first >= candidate).to(tl.int32), 0)
            if not ONE_BLOCK:
                for start in tl.range(BLOCK, keys, BLOCK):
                    reached += tl.sum((_ordered(scores_ptr, start + column, keys) >= candidate).to(tl.int32), 0)
            threshold = tl.where(reached >= top, candidate, threshold)
        above = tl.sum((first > threshold).to(tl.int32), 0)
        if not ONE_BLOCK:
            for start in tl.range(BLOCK, keys, BLOCK):
                above += tl.sum((_ordered(scores_ptr, start + column, keys) > threshold).to(tl.int32), 0)
    equal_left = top - above

    for start in tl.range(0, 1 if ONE_BLOCK else keys, BLOCK):
        ordered = first if ONE_BLOCK else _ordered(scores_ptr, start + column, keys)
        equal = (ordered == threshold).to(tl.int32)
        place = tl.cumsum(equal, 0)
        chosen = ((ordered > threshold) | ((equal != 0) & (place <= equal_left))).to(tl.int32)
        equal_left -= tl.sum(equal, 0)
        words = tl.sum(tl.reshape(chosen, (BLOCK // 32, 32)) << tl.arange(0, 32)[None, :], 1)
        word = start // 32 + tl.arange(0, BLOCK // 32)
        tl.store(bits_ptr + word, words.to(tl.int32), mask=word * 32 < keys)


_launch = KernelLauncher(_select_kernel)


def select_keys(scores: Tensor, top: int, bits: Tensor) -> None:
    """Write what `eager_select` of `bits.py` returns to `bits`, which is contiguous; scores are in float32."""
    scores, bits = scores.contiguous().flatten(0, 1), bits.flatten(0, 1)
    rows, keys = scores.shape
    if rows == 0 or keys == 0:
        return
    block = max(32, min(_BLOCK, triton.next_power_of_2(keys)))
    _launch(
        (rows, 1, 1),
        (scores, bits),
        (scores.stride(0), bits.stride(0)),
        (keys, top),
        (block, keys <= block),
        8 if block >= 4096 else 4,
    )
