"""Visible keys of each query, and queries of each key, as intervals of tokens.

Causality, windows and documents all make the keys that a query sees an interval [start, end). Neither end
decreases from one query to the next, so the interval of a block of queries follows from its first and last query, and
the queries that see a key are an interval too. The attention kernels only read these intervals.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from opslot._base.kernel_launch import KernelLauncher, cdiv

# A distance beyond every length.
UNLIMITED = 2**30
_BLOCK = 256


@triton.jit
def _bound(cu_ptr, document, documents, row, length, rows):
    """Start of a document within its row. The one after the last document holds the remaining tokens."""
    start = tl.load(cu_ptr + document, mask=document <= documents, other=0).to(tl.int32)
    start = tl.where(document <= documents, start, rows * length)
    return tl.minimum(tl.maximum(start - row * length, 0), length)


@triton.jit(do_not_specialize=["rows", "queries", "keys", "documents", "before", "after"])
def _intervals_kernel(
    cu_q_ptr,
    cu_k_ptr,
    intervals_ptr,
    interval_stride,
    rows,
    queries,
    keys,
    documents,
    before,
    after,
    HAS_DOCUMENTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    size = tl.num_programs(1).to(tl.int64) * interval_stride
    intervals_ptr += tl.program_id(1).to(tl.int64) * interval_stride
    row = tl.program_id(1)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    for KEYS in tl.static_range(2):
        if tl.program_id(2) == KEYS:
            own_cu_ptr, other_cu_ptr = (cu_k_ptr, cu_q_ptr) if KEYS else (cu_q_ptr, cu_k_ptr)
            own_length, other_length = (keys, queries) if KEYS else (queries, keys)
            own_start = tl.zeros((BLOCK,), dtype=tl.int32)
            own_end = own_start + own_length
            other_start = own_start
            other_end = own_start + other_length
            if HAS_DOCUMENTS:
                # The last boundary that is not after the token. Tokens after the last boundary are another document.
                document = tl.zeros((BLOCK,), dtype=tl.int32)
                above = document + documents + 1
                flat = row * own_length + token
                width = documents + 1
                while width > 0:
                    middle = (document + above) // 2
                    after_middle = tl.load(own_cu_ptr + middle).to(tl.int32) <= flat
                    narrow = above - document > 1
                    document = tl.where(narrow & after_middle, middle, document)
                    above = tl.where(narrow & (after_middle == 0), middle, above)
                    width //= 2
                own_start = _bound(own_cu_ptr, document, documents, row, own_length, rows)
                own_end = _bound(own_cu_ptr, document + 1, documents, row, own_length, rows)
                other_start = _bound(other_cu_ptr, document, documents, row, other_length, rows)
                other_end = _bound(other_cu_ptr, document + 1, documents, row, other_length, rows)
            # Positions count from the document's first key, and its last query is at its last key.
            shift = (other_end - other_start) - (own_end - own_start)
            position = token - own_start + shift
            # A query sees the keys up to `before` tokens before it and `after` tokens after it, a key the reverse.
            start = position - (after if KEYS else before)
            end = position + (before if KEYS else after) + 1
            start = tl.minimum(tl.maximum(start, 0) + other_start, other_end)
            end = tl.maximum(tl.minimum(end + other_start, other_end), start)
            start_ptr = intervals_ptr + 2 * KEYS * size
            tl.store(start_ptr + token, start, mask=token < own_length)
            tl.store(start_ptr + size + token, end, mask=token < own_length)


_launch_intervals = KernelLauncher(_intervals_kernel)


def interval_strides(found: Tensor | None) -> tuple[int, int]:
    """Of `intervals`: from one row to the next, 0 where all are equal, and from start to end."""
    if found is None:
        return 0, 0
    return 0 if found.shape[1] == 1 else found.stride(1), found.stride(0)


def intervals(
    q: Tensor,
    k: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    causal: bool,
    window: int | None,
) -> Tensor:
    """Int32 [4, rows, tokens] for q [B, S, N, D] and k [B, S_kv, K, D]: start and end of the keys that each query sees,
    then start and end of the queries that see each key. `rows` is 1 without documents, since all are equal.

    Args:
        window: a query sees `window` keys up to its own, and without causality `window - 1` after it.
    """
    (batch, queries), keys = q.shape[:2], k.shape[1]
    bounds = [cu.contiguous() for cu in (cu_seqlens_q, cu_seqlens_k) if cu is not None]
    rows = batch if bounds else 1
    # Multiples of 16 keep the fast path of the launcher.
    found = torch.empty(4, rows, cdiv(max(queries, keys), 16) * 16, dtype=torch.int32, device=q.device)
    before = UNLIMITED if window is None else window - 1
    after = 0 if causal else before
    _launch_intervals(
        (cdiv(max(queries, keys), _BLOCK), rows, 2),
        (bounds[0], bounds[-1], found) if bounds else (found, found, found),
        (found.stride(1),),
        (
            rows,
            queries,
            keys,
            bounds[0].shape[0] - 1 if bounds else 0,
            before,
            after,
        ),
        (bool(bounds), _BLOCK),
        4,
    )
    return found
