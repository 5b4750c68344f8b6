"""What an indexer needs for attention whose keys are selected as bits: with Triton, or in plain PyTorch without."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from opslot.ops._common.custom_op import launch_op
from opslot.ops._common.specs import runs_triton
from opslot.ops.attention.reference import pack_bits, unpack_bits


def _words(keys: int) -> int:
    return -(-keys // 32)


def _run_intervals(out: Tensor, like: Tensor, *arguments: Any) -> None:
    cu_seqlens, batch, queries, keys, causal, window = arguments
    if not runs_triton(like):
        out.copy_(eager_intervals(cu_seqlens, batch, queries, keys, causal, window, like.device))
        return
    from opslot.ops.attention.kernels.intervals import intervals

    q, k = (like.new_empty(()).expand(batch, tokens, 1, 1) for tokens in (queries, keys))
    out.copy_(intervals(q, k, cu_seqlens, None, causal, window)[:2, :, :queries])


def eager_intervals(
    cu_seqlens: Tensor | None,
    batch: int,
    queries: int,
    keys: int,
    causal: bool,
    window: int | None,
    device: torch.device,
) -> Tensor:
    """Int32 [2, R, queries], the first key that each query sees and the one after the last; R is B with documents."""
    place = torch.arange(queries, device=device)[None]
    if cu_seqlens is None:
        first, stop, position = torch.zeros_like(place), torch.full_like(place, keys), place + keys - queries
    else:
        # Queries are the keys. Tokens after the last boundary are also a document.
        rows = torch.arange(0, batch * queries, queries, device=device)[:, None]
        bounds = torch.cat([cu_seqlens.to(device, torch.int64), rows.new_full((1,), batch * queries)])
        document = torch.searchsorted(bounds[1:-1], rows + place, right=True)
        first = (bounds[document] - rows).clamp(min=0)
        stop, position = (bounds[document + 1] - rows).clamp(max=queries), place
    before = keys if window is None else window - 1
    start = (position - before).maximum(first)
    end = (position + (0 if causal else before) + 1).minimum(stop)
    return torch.stack([start.minimum(stop), end.maximum(start.minimum(stop))]).int()


visible_intervals = launch_op(
    "visible_intervals(Tensor like, Tensor? cu_seqlens, SymInt batch, SymInt queries, SymInt keys, bool causal,"
    " SymInt? window) -> Tensor",
    lambda like, cu_seqlens, batch, queries, *_: like.new_empty(
        2, 1 if cu_seqlens is None else batch, queries, dtype=torch.int32
    ),
    _run_intervals,
)


def _allocate_bits(scores: Tensor, top: int) -> Tensor:
    return scores.new_empty(*scores.shape[:2], _words(scores.shape[2]), dtype=torch.int32)


def _run_select(bits: Tensor, scores: Tensor, top: int) -> None:
    if not runs_triton(scores):
        bits.copy_(eager_select(scores, top))
        return
    from opslot.ops.attention.kernels.select_keys import select_keys

    select_keys(scores, top, bits)


def eager_select(scores: Tensor, top: int) -> Tensor:
    """Bits of the `top` keys with the highest of `scores` [B, S, T], of equal ones the first; none with -inf."""
    # Stable, so that equal scores are in the order of keys.
    keys = scores.sort(dim=-1, descending=True, stable=True).indices[..., :top]
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, keys, True)
    return pack_bits(chosen & (scores > float("-inf")))


_select = launch_op("select_keys(Tensor scores, SymInt top) -> Tensor", _allocate_bits, _run_select)


def select(scores: Tensor, top: int) -> Tensor:
    """`eager_select`, with Triton where it runs; calls go through `TorchFunctionMode`s, as those of `topk`."""
    if has_torch_function_unary(scores):
        return handle_torch_function(select, (scores,), scores, top)
    return _select(scores, top)


def _run_expand(bits: Tensor, pool_bits: Tensor, pools: Tensor, seen: Tensor, tail: Tensor | None) -> None:
    if not runs_triton(pool_bits):
        bits.copy_(eager_expand_pools(pool_bits, pools, seen, tail))
        return
    from opslot.ops.attention.kernels.expand_pools import expand_pools

    expand_pools(pool_bits.contiguous(), pools, seen, tail, bits)


def eager_expand_pools(pool_bits: Tensor, pools: Tensor, seen: Tensor, tail: Tensor | None) -> Tensor:
    """Bits [B, H, S, ceil(T / 32)] of the keys in pools with bits [B, H, S, ceil(P / 32)].

    Args:
        pools: int32 [B or 1, T], the pool of each key; -1 for keys in none, and -2 for those that no query sees.
        seen: int32 [2, B or 1, S], the first key that each query sees and the one after the last.
        tail: int32 [B or 1, S], the first of the keys that each query sees in any case; or None.
    """
    key = torch.arange(pools.shape[1], device=pools.device)
    shown = ((key >= seen[0][..., None]) & (key < seen[1][..., None]))[:, None]
    of_pools = unpack_bits(pool_bits, 32 * pool_bits.shape[3])
    index = pools.clamp(min=0).long()[:, None, None].expand(*of_pools.shape[:3], -1)
    chosen = of_pools.gather(-1, index) if of_pools.shape[3] else index != index
    chosen = chosen & (pools >= 0)[:, None, None]
    if tail is not None:
        chosen = chosen | ((pools > -2)[:, None] & (key >= tail[..., None]))[:, None]
    return pack_bits(chosen & shown)


expand_pools = launch_op(
    "expand_pools(Tensor pool_bits, Tensor pools, Tensor seen, Tensor? tail) -> Tensor",
    lambda pool_bits, pools, *_: pool_bits.new_empty(*pool_bits.shape[:3], _words(pools.shape[1])),
    _run_expand,
)
