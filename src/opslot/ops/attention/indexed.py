"""What an indexer does for a kernel of attention: select the keys of each query, as bits.

Scores exist for one chunk of queries at a time, [B, chunk, T], and never for each head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from opslot.distributed.ulysses import gather_outputs
from opslot.ops._common.by_document import ranks_of_shards
from opslot.ops.attention.bits import select, visible_intervals
from opslot.ops.attention.layout import Layout
from opslot.ops.attention.reference import causal_of
from opslot.ops.attention.visible import Visible
from opslot.ops.indexer_scores.op import standard as eager_scores

# Memory for the scores of a chunk of queries.
_SCORES_BYTES = 1 << 28


def visible_keys(module: nn.Module, query: Tensor, key: Tensor, mask: Any, kwargs: Mapping[str, Any]) -> Visible:
    """The keys that each query sees without an indexer.

    Args:
        query, key: [B, N, S, D] and [B, N, T, D].
        mask: a `Layout`, a padding mask [B, T], a dense mask [B or 1, 1, S, T], or None.
        kwargs: arguments of attention, which may have the boundaries of documents.
    """
    ranks = ranks_of_shards(module)
    if ranks is not None:
        return _of_global_sequences(module, query, mask, kwargs, ranks)
    shown, given = None, mask if isinstance(mask, Tensor) else None
    if isinstance(mask, Layout):
        kwargs = mask.arguments(query, kwargs)
    elif mask is not None:
        mask = mask[:, None, None, -key.shape[2] :].bool() if mask.dim() == 2 else mask
        shown = (mask if mask.dtype == torch.bool else mask >= 0)[:, 0]
    cu_seqlens = kwargs.get("cu_seq_lens_q")
    if shown is not None and shown.shape[1] > 1 and cu_seqlens is None:
        # Also unused keys of a static cache, after which the last query is not.
        return Visible(None, shown, mask=given)
    sizes = query.shape[0], query.shape[2], key.shape[2]
    window = kwargs.get("sliding_window")
    found = visible_intervals(query, cu_seqlens, *sizes, causal_of(module, kwargs), window)
    return Visible(found, shown, documents=_documents(cu_seqlens), mask=given)


def _documents(cu_seqlens: Tensor | None) -> int:
    """How many documents a row may have: those after the last boundary too."""
    return 1 if cu_seqlens is None else cu_seqlens.shape[0]


# torch 2.11 cannot trace groups of ranks.
@torch.compiler.disable
def _of_all_ranks(key: Tensor, ranks: ProcessGroup) -> Tensor:
    with torch.no_grad():
        return gather_outputs(key, 1, ranks)


@torch.compiler.disable
def _of_global_sequences(
    module: nn.Module, query: Tensor, mask: Any, kwargs: Mapping[str, Any], ranks: ProcessGroup
) -> Visible:
    """`visible_keys` for queries of a rank's shards, among the keys of all ranks. Masks of shards are `Layout` or None.

    Boundaries of documents are those of the global sequences.
    """
    if isinstance(mask, Layout):
        kwargs = mask.arguments(query, kwargs)
    batch, _, local, _ = query.shape
    length = local * ranks.size()
    options = causal_of(module, kwargs), kwargs.get("sliding_window")
    cu_seqlens = kwargs.get("cu_seq_lens_q")
    found = visible_intervals(query, cu_seqlens, batch, length, length, *options)
    own = found.narrow(2, dist.get_rank(ranks) * local, local)
    given = mask if isinstance(mask, Tensor) else None
    return Visible(own, None, ranks, found[0], _documents(cu_seqlens), given)


def keys_of_all_ranks(key: Tensor, visible: Visible) -> Tensor:
    """[B, T, ...] of a rank's shard [B, T / ranks, ...], without gradient; `key` itself where ranks have whole keys."""
    return key if visible.ranks is None else _of_all_ranks(key, visible.ranks)


def chunks_of_queries(length: int, row_bytes: int) -> Iterator[slice]:
    """Chunks of `length` queries, whose scores take `row_bytes` each."""
    chunk = max(1, _SCORES_BYTES // max(1, row_bytes))
    return (slice(first, first + chunk) for first in range(0, max(1, length), chunk))


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
    key = keys_of_all_ranks(key, visible)
    batch, length, heads, _ = query.shape
    found = []
    for part in chunks_of_queries(length, 4 * batch * key.shape[1] * (1 if kernel else heads)):
        limits = None if visible.intervals is None else visible.intervals[:, :, part]
        own = scores(query[:, part], key, weights[:, part], scale, limits)
        if visible.shown is not None:
            shown = visible.shown if visible.shown.shape[1] == 1 else visible.shown[:, part]
            own = own.masked_fill(~shown, float("-inf"))
        found.append(select(own, top))
    return found[0] if len(found) == 1 else torch.cat(found, 1)
