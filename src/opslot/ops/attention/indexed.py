"""What an indexer does for a kernel of attention: select the keys of each query, as bits.

Scores exist for one chunk of queries at a time, [B, chunk, T], and never for each head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from opslot._base.kernel_launch import cdiv
from opslot.ops._common.custom_op import launch_op
from opslot.ops.attention.kernels.intervals import intervals
from opslot.ops.attention.kernels.select_keys import select_keys as launch_select
from opslot.ops.attention.masks import Layout
from opslot.ops.attention.reference import causal_of
from opslot.ops.attention.visible import Visible
from opslot.ops.indexer_scores.op import standard as eager_scores

# Of the scores of a chunk of queries.
_SCORES_BYTES = 1 << 28


def visible_keys(module: nn.Module, query: Tensor, key: Tensor, mask: Any, kwargs: Mapping[str, Any]) -> Visible:
    """The keys that each query sees without an indexer.

    Args:
        query, key: [B, N, S, D] and [B, N, T, D].
        mask: a `Layout`, a padding mask [B, T], a dense mask [B or 1, 1, S, T], or None.
        kwargs: arguments of attention, which may have the boundaries of documents.
    """
    shown = None
    if isinstance(mask, Layout):
        kwargs = mask.arguments(query, kwargs)
    elif mask is not None:
        mask = mask[:, None, None, -key.shape[2] :].bool() if mask.dim() == 2 else mask
        shown = (mask if mask.dtype == torch.bool else mask >= 0)[:, 0]
    cu_seqlens = kwargs.get("cu_seq_lens_q")
    if shown is not None and shown.shape[1] > 1 and cu_seqlens is None:
        # Also unused keys of a static cache, after which the last query is not.
        return Visible(None, shown)
    q, k = query.transpose(1, 2), key.transpose(1, 2)
    return Visible(_intervals(q, k, cu_seqlens, causal_of(module, kwargs), kwargs.get("sliding_window")), shown)


def select_keys(
    kernel: Callable[..., Tensor] | None,
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    scale: float,
    visible: Visible,
    top: int,
) -> Tensor:
    """The `top` visible keys of each query with the highest scores: int32 [B, S, ceil(T / 32)].

    Bit i of word w is key 32 w + i. Of equal scores, the first keys are selected.

    Args:
        kernel: of the op indexer_scores; None for plain PyTorch.
        query, key, weights, scale: its arguments.
    """
    scores = kernel or eager_scores
    batch, length, heads, _ = query.shape
    row_bytes = 4 * batch * key.shape[1] * (1 if kernel else heads)
    chunk = max(1, _SCORES_BYTES // max(1, row_bytes))
    found = []
    for first in range(0, max(1, length), chunk):
        part = slice(first, first + chunk)
        limits = None if visible.intervals is None else visible.intervals[:, :, part]
        own = scores(query[:, part], key, weights[:, part], scale, limits)
        if visible.shown is not None:
            shown = visible.shown if visible.shown.shape[1] == 1 else visible.shown[:, part]
            own = own.masked_fill(~shown, float("-inf"))
        found.append(_select(own, top))
    return found[0] if len(found) == 1 else torch.cat(found, 1)


def _allocate_intervals(q: Tensor, k: Tensor, cu_seqlens: Tensor | None, causal: bool, window: int | None) -> Tensor:
    rows = 1 if cu_seqlens is None else q.shape[0]
    return q.new_empty(2, rows, q.shape[1], dtype=torch.int32)


def _run_intervals(
    out: Tensor, q: Tensor, k: Tensor, cu_seqlens: Tensor | None, causal: bool, window: int | None
) -> None:
    out.copy_(intervals(q, k, cu_seqlens, None, causal, window)[:2, :, : q.shape[1]])


_intervals = launch_op(
    "visible_intervals(Tensor q, Tensor k, Tensor? cu_seqlens, bool causal, SymInt? window) -> Tensor",
    _allocate_intervals,
    _run_intervals,
)


def _allocate_bits(scores: Tensor, top: int) -> Tensor:
    return scores.new_empty(*scores.shape[:2], cdiv(scores.shape[2], 32), dtype=torch.int32)


def _run_select(bits: Tensor, scores: Tensor, top: int) -> None:
    launch_select(scores, top, bits)


_select = launch_op("select_keys(Tensor scores, SymInt top) -> Tensor", _allocate_bits, _run_select)
