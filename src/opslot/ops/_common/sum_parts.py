"""The sum of what the ranks sent of a gradient, in Triton: each number read once and written once.

torch's sum over the first of two dims reaches 1.4 of an H200's 4.3 TB/s where the result is wider than what is added up
(profile of `benchmarks/parallel.py`), and needs a rank's own part copied beside the others'.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from opslot.ops._common.jit import narrow
from opslot.ops._common.triton import cdiv

_BLOCK = 4096


@triton.jit(do_not_specialize=["rank"])
def _sum_parts_kernel(
    own_ptr, parts_ptr, out_ptr, rank, length, COUNT: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < length
    total = tl.zeros((BLOCK,), ACC)
    for other in tl.static_range(COUNT):
        mine = tl.where(rank == other, length, 0)
        row = parts_ptr + tl.cast(other, tl.int64) * length
        total += tl.load(own_ptr + at, mask=at < mine, other=0.0).to(ACC)
        total += tl.load(row + at, mask=inside & (at >= mine), other=0.0).to(ACC)
    tl.store(out_ptr + at, narrow(total, out_ptr.dtype.element_ty), mask=inside)


def sum_parts(own: Tensor, parts: Tensor, rank: int, out: Tensor) -> None:
    """out = the sum of the rows of `parts` with row `rank` replaced by `own`, added in order of the rows.

    In float32, or float64 for float64.

    Args:
        own: [n], contiguous.
        parts: [R, n], contiguous, in the dtype of `own`.
        out: [n], contiguous.
    """
    count, length = parts.shape
    if length:
        wide = tl.float64 if out.dtype == torch.float64 else tl.float32
        _sum_parts_kernel[(cdiv(length, _BLOCK),)](
            own, parts, out, rank, length, COUNT=count, ACC=wide, BLOCK=_BLOCK, num_warps=8
        )
