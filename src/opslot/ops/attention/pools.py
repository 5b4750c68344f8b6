"""Pools: adjacent keys of a document that an indexer selects together, and the bits of the keys in them.

Pools are counted from the first key of each document, and padding is in none. Which keys are in a pool does not depend
on the query, so keys are pooled once, and a query sees an interval of pools.

Shapes: B batch, R rows, B or 1, S queries, T keys, P pools, as many as there can be.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from opslot.ops.attention.bits import expand_pools, select
from opslot.ops.attention.indexed import chunks_of_queries, keys_of_all_ranks, select_keys
from opslot.ops.attention.visible import Visible
from opslot.ops.indexer_scores.op import block_max as eager_block_max

_NOT_NESTED = "an indexer that selects pools of keys needs a mask that shows a query the earlier tokens of its document"


class Pools(NamedTuple):
    """The pools of a sequence.

    Attributes:
        keys: int64 [R, P, size], of each pool; those of pools that do not exist are any keys.
        of_keys: int32 [R, T], the pool of each key; -1 for keys in none, and -2 for those that no query sees.
        limits: int32 [2, R, S], the first pool that each query sees and the one after the last.
        seen: int32 [2, R, S], the first key that each query sees and the one after the last.
        tail: int32 [R, S], the first key after the pools that each query sees.
    """

    keys: Tensor
    of_keys: Tensor
    limits: Tensor
    seen: Tensor
    tail: Tensor

    def gather(self, x: Tensor) -> Tensor:
        """[B, P, size, D] of x [B, T, D]."""
        rows, count, size = self.keys.shape
        x = x.expand(max(rows, x.shape[0]), -1, -1)
        if rows == 1:
            return x.index_select(1, self.keys.flatten()).unflatten(1, (count, size))
        return x.gather(1, self.keys.flatten(1)[..., None].expand(-1, -1, x.shape[2])).unflatten(1, (count, size))

    def first(self, x: Tensor) -> Tensor:
        """[B, P, D] of x [B, T, D]: that of the first key of each pool."""
        return self._replace(keys=self.keys[:, :, :1]).gather(x).squeeze(2)


def pools_of(visible: Visible, keys: int, size: int) -> Pools:
    """Pools of `size` keys each, of `keys` keys; the rest of a document is in none."""
    seen, starts, real = _rows(visible, keys)
    place = _places(starts, real)
    last = place % size == size - 1
    last = last if real is None else last & real
    count = max(1, keys // size)
    ends = last.cumsum(-1)
    key = torch.arange(keys, device=place.device).expand_as(place)
    # The pool that ends next is that of a key if it is of the same document.
    pool = ends - last.long()
    last_keys = key.new_zeros(key.shape[0], count + 1).scatter_(1, pool.where(last, count), key)
    in_pool = (pool < ends[:, -1:]) & (starts.gather(1, last_keys.gather(1, pool.clamp(max=count))) == starts)
    in_pool = in_pool if real is None else in_pool & real
    slot = (pool * size + place % size).where(in_pool, count * size)
    members = key.new_zeros(key.shape[0], count * size + 1).scatter_(1, slot, key)[:, :-1].unflatten(1, (count, size))
    of_keys = pool.where(in_pool, -1)
    of_keys = of_keys if real is None else of_keys.masked_fill(~real, -2)
    limits = _limits(ends, seen)
    after = last_keys.gather(1, (limits[1] - 1).clamp(min=0)) + 1
    tail = after.where(limits[1] > limits[0], seen[0].long())
    return Pools(members, of_keys.int(), limits.int(), seen.int(), tail.int())


def blocks_of(visible: Visible, keys: int, size: int) -> tuple[Pools, Tensor]:
    """Pools of `size` keys each, of which the last of a document may have fewer; and int32 [2, R, P], the first key of
    each and the one after the last.
    """
    seen, starts, real = _rows(visible, keys)
    place = _places(starts, real)
    first = place % size == 0
    first = first if real is None else first & real
    count = min(keys, -(-keys // size) + visible.documents - 1)
    begins = first.cumsum(-1)
    key = torch.arange(keys, device=place.device).expand_as(place)
    pool = begins - 1
    inside = pool >= 0 if real is None else real & (pool >= 0)
    slot = pool.where(inside, count)
    bounds = key.new_zeros(2, key.shape[0], count + 1)
    # A tensor of both numbers would be a copy to the GPU that waits for it.
    bounds[0] = keys
    bounds[0].scatter_(1, slot.where(first, count), key)
    bounds[1].scatter_reduce_(1, slot, key + 1, "amax")
    limits, of_keys = _limits(begins, seen), pool.where(inside, -2)
    pools = Pools(bounds[0, :, :-1, None], of_keys.int(), limits.int(), seen.int(), seen[1].int())
    return pools, bounds[..., :-1].int()


def blocks_before(position_ids: Tensor, keys: int, size: int) -> tuple[Tensor, Tensor]:
    """Blocks of `size` keys, int32 [2, 1, P], the first key of each and the one after the last; and int32 [2, B, S] of
    the keys up to `position_ids` [B, S], whatever the documents.
    """
    first = torch.arange(0, keys, size, dtype=torch.int32, device=position_ids.device)
    end = (position_ids + 1).int()
    return torch.stack([first, (first + size).clamp(max=keys)])[:, None], torch.stack([torch.zeros_like(end), end])


def _rows(visible: Visible, keys: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Int64 [2, R, S] of the keys that queries see, and [R, T] of the first key of each key's document; and bool [R, T]
    of the keys that are not padding, or None where none is.
    """
    if visible.intervals is None or (visible.shown is not None and visible.shown.shape[1] > 1):
        return _rows_of_mask(visible, keys)
    seen = visible.intervals.long()
    if visible.starts is not None:
        starts = visible.starts.long()
    else:
        # A cache has the keys of one document.
        starts = seen[0] if seen.shape[2] == keys else seen[0, :, -1:].expand(-1, keys)
    if visible.shown is None:
        return seen, starts, None
    real = visible.shown[:, 0]
    return seen.expand(-1, real.shape[0], -1), starts.expand(real.shape[0], -1), real


def _rows_of_mask(visible: Visible, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    """`_rows` of a mask of queries and keys."""
    assert visible.shown is not None
    shown, key = visible.shown, torch.arange(keys, device=visible.shown.device)
    if visible.intervals is not None:
        start, end = visible.intervals[..., None]
        shown = shown & (key >= start) & (key < end)
    start = shown.long().argmax(-1)
    end = (shown * (key + 1)).amax(-1)
    real = shown.any(1)
    starts = start if shown.shape[1] == keys else start[:, -1:].expand(-1, keys)
    nested = (key >= start[..., None]) & (key < end[..., None]) & real[:, None]
    torch._assert_async((nested == shown).all(), _NOT_NESTED)
    return torch.stack([start, end]), starts, real


def _places(starts: Tensor, real: Tensor | None) -> Tensor:
    """The number of keys before each key in its document."""
    if real is None:
        return torch.arange(starts.shape[1], device=starts.device) - starts
    before = real.cumsum(-1) - real.long()
    return before - before.gather(1, starts)


def _limits(counts: Tensor, seen: Tensor) -> Tensor:
    """Int64 [2, R, S]: how many of what `counts` [R, T] counts are before the first key that a query sees, and before
    the one after the last.
    """
    before = pad(counts, (1, 0)).expand(seen.shape[1], -1)
    return torch.stack([before.gather(1, bound) for bound in seen])


def select_pools(
    kernel: Callable[..., Tensor] | None,
    query: Tensor,
    key: Tensor,
    weights: Tensor | None,
    scale: float,
    pools: Pools,
    top: int,
    with_tail: bool = True,
) -> Tensor:
    """Bits of the keys in the `top` pools with the highest scores: int32 [B, S, ceil(T / 32)].

    Args:
        kernel: of the op indexer_scores; None for plain PyTorch.
        query: [B, S, H, D].
        key: [B, P, D], one of each pool.
        weights: [B, S, H]; ones if None.
        with_tail: also of the keys after the last pool that a query sees.
    """
    if weights is None:
        weights = query.new_ones((), dtype=torch.float32).expand(query.shape[:3])
    bits = select_keys(kernel, query, key, weights, scale, Visible(pools.limits, None), top)
    tail = pools.tail if with_tail else None
    return expand_pools(bits[:, None], pools.of_keys, pools.seen, tail).squeeze(1)


def select_blocks(
    kernel: Callable[..., Tensor] | None,
    query: Tensor,
    key: Tensor,
    visible: Visible,
    size: int,
    local: int,
    top: int,
) -> Tensor:
    """Bits of the keys in the `top` blocks of each head with the highest score: int32 [B, H, S, ceil(T / 32)].

    The score of a block is the highest of the keys in it that a query sees. The `local` last blocks come first.

    Args:
        kernel: of the variant block_max of the op indexer_scores; None for plain PyTorch.
        query: [B, S, H, D].
        key: [B, T, D].
        size: keys of a block.
    """
    key = keys_of_all_ranks(key, visible)
    pools, bounds = blocks_of(visible, key.shape[1], size)
    recent = pools.limits[1].long()[..., None] - 1 - torch.arange(local, device=query.device)
    recent = recent.clamp(min=pools.limits[0].long()[..., None]).clamp(0, bounds.shape[2] - 1)
    batch, length, heads, _ = query.shape
    row_bytes = 4 * batch * heads * (bounds.shape[2] if kernel else key.shape[1])
    found = []
    for part in chunks_of_queries(length, row_bytes):
        scores = (kernel or eager_block_max)(query[:, part], key, bounds, pools.seen[:, :, part])
        places = recent[:, None, part].expand(batch, heads, -1, -1)
        scores = scores.scatter(-1, places, float("inf"))
        found.append(select(scores.flatten(0, 1), top).unflatten(0, (batch, heads)))
    bits = found[0] if len(found) == 1 else torch.cat(found, 2)
    return expand_pools(bits, pools.of_keys, pools.seen, None)
