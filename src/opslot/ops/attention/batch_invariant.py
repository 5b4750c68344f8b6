"""`batch_invariant`: Triton attention whose results for a document do not depend on the other documents, bit for bit.

The `triton` kernel computes a tile of queries together. Its keys begin with the first document in the tile, so the
order in which a query sums over its keys depends on the documents before it. Here every document begins a tile of its
own: queries are moved apart, and the gaps are documents without keys.

Shapes as in triton.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from opslot._base.kernel_launch import cdiv
from opslot.ops.attention import triton

# Tokens; a multiple of the rows of every tile of queries, whatever the number of heads per group.
_ALIGN = 128


def _attend(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, *options: Any
) -> Tensor:
    batch, length, heads, width = q.shape
    q, k, v = (x.reshape(1, -1, *x.shape[2:]) for x in (q, k, v))
    starts, ends = _documents(cu_seqlens_q, batch, length, q.device)
    key_starts, key_ends = starts, ends
    if cu_seqlens_k is not None or k.shape[1] != q.shape[1]:
        boundaries = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
        key_starts, key_ends = _documents(boundaries, batch, k.shape[1] // batch, q.device)
    sizes = (ends - starts + _ALIGN - 1) // _ALIGN * _ALIGN
    places = sizes.cumsum(0) - sizes
    token = torch.arange(batch * length, device=q.device)
    document = torch.searchsorted(ends, token, right=True)
    place = token - starts[document] + places[document]
    # Known without a synchronization.
    rows = cdiv(batch * length + starts.numel() * (_ALIGN - 1), _ALIGN) * _ALIGN
    apart = q.new_zeros(1, rows, heads, width).index_copy(1, place, q)
    cu_q = torch.stack([places, places + ends - starts], 1).flatten().to(torch.int32)
    cu_k = torch.stack([key_starts, key_ends], 1).flatten().to(torch.int32)
    out = triton.attend(apart, k, v, cu_q, cu_k, *options).index_select(1, place)
    return out.view(batch, length, *out.shape[2:])


attention = triton.make_attention("batch_invariant", _attend)


def _documents(cu_seqlens: Tensor | None, batch: int, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Starts and ends of all documents, which end at the ends of rows; some may be empty."""
    rows = torch.arange(batch + 1, device=device) * length
    bounds = rows if cu_seqlens is None else torch.cat([cu_seqlens.to(rows), rows]).sort().values
    return bounds[:-1], bounds[1:]
