"""Sums after collectives, in Triton: each element is read and written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from opslot._base.jit import downcast


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
    tl.store(out_ptr + at, downcast(total, out_ptr.dtype.element_ty), mask=inside)


def sum_parts(own: Tensor, parts: Tensor, rank: int, out: Tensor) -> None:
    """out = the sum of the rows of `parts` with row `rank` replaced by `own`, added in order of the rows.

    Accumulates in float32, or float64 for float64. torch's sum over dim 0 reaches 1.4 of an H200's 4.3
    TB/s if the output has more bits than the input (profile of `benchmarks/parallel.py`), and requires a copy of the
    rank's own part next to the others.

    Args:
        own: [n], contiguous.
        parts: [R, n], contiguous, in the dtype of `own`.
        out: [n], contiguous.
    """
    count, length = parts.shape
    if length:
        block = 4096
        _sum_parts_kernel[(-(-length // block),)](
            own, parts, out, rank, length, COUNT=count, ACC=_accumulator(out.dtype), BLOCK=block, num_warps=8
        )


@triton.jit
def _sum_rows_kernel(
    rows_ptr, order_ptr, first_ptr, out_ptr, tokens, count, width, ACC: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    begin = tl.load(first_ptr + token)
    end = tl.load(first_ptr + token + 1, mask=token + 1 < tokens, other=count)
    total = tl.zeros((BLOCK,), ACC)
    for i in range(begin, end):
        row = tl.load(order_ptr + i)
        total += tl.load(rows_ptr + row * width + column, mask=inside, other=0.0).to(ACC)
    tl.store(out_ptr + token * width + column, downcast(total, out_ptr.dtype.element_ty), mask=inside)


def sum_rows(rows: Tensor, order: Tensor, first: Tensor) -> Tensor:
    """out[t] = the sum of rows[order[first[t] : first[t + 1]]]; the last token's rows extend to the end of `order`.

    At 16,384 tokens of 2,048, 3.6 rows each, the roofline of an H200 is 0.07 ms; torch's embedding_bag takes 0.72 ms
    (profile of `benchmarks/parallel.py`).

    Args:
        rows: [M, H], contiguous; added in float32, or float64 for float64.
        order: int64 [M].
        first: int64 [T], not descending.

    Returns:
        [T, H] like `rows`; zero for a token without rows. Deterministic.
    """
    tokens, width = len(first), rows.shape[1]
    out = rows.new_empty(tokens, width)
    if out.numel():
        block = min(2048, triton.next_power_of_2(width))
        _sum_rows_kernel[(tokens, -(-width // block))](
            rows,
            order,
            first,
            out,
            tokens,
            len(order),
            width,
            ACC=_accumulator(rows.dtype),
            BLOCK=block,
            num_warps=max(1, block // 512),
        )
    return out


def _accumulator(dtype: torch.dtype) -> tl.dtype:
    return tl.float64 if dtype == torch.float64 else tl.float32
