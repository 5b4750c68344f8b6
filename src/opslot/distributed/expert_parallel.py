"""Experts that live on different ranks: tokens travel to them and their outputs back.

A token goes once to each rank that holds some of its experts, not once to each expert, and comes back as that rank's
weighted sum: at 8 experts a token on 4 ranks this moves less than half as many rows.

Shapes: T tokens here, K experts a token, H hidden width, M rows sent, N rows received.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from opslot.distributed._collectives import all_to_all
from opslot.distributed.parallel_state import get_parallel_state


class ExpertParallel:
    """A kernel of the op moe_experts for ranks that hold parts of the experts.

    Called like the kernel: `hidden_states` [T, H], `gate_up_proj` and `down_proj` with this rank's experts (or DTensors
    over ep), `top_k_index` [T, K] over all experts, `top_k_weights` [T, K]; returns [T, H]. Ranks may bring any number
    of tokens, none included, and every rank must make the call, forward and backward.

    Attributes:
        kernel: gets the rows that came here, with indices of local experts; an index equal to their number marks an
            expert of another rank.
    """

    def __init__(self, kernel: Callable[..., Tensor], group: ProcessGroup | None = None) -> None:
        self.kernel = kernel
        self._group = group

    def __call__(
        self,
        hidden_states: Tensor,
        gate_up_proj: Tensor,
        down_proj: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
    ) -> Tensor:
        group = self._group or get_parallel_state().ep_group
        gate_up, down = (w.to_local() if isinstance(w, DTensor) else w for w in (gate_up_proj, down_proj))
        if group is None:
            return self.kernel(hidden_states, gate_up, down, top_k_index, top_k_weights)
        experts = gate_up.shape[0]
        route = plan_route(top_k_index, experts, group)
        x, weights = (_TakeRows.apply(t, route.token, route.sent) for t in (hidden_states, top_k_weights))
        x, weights = (all_to_all(t, group, route.received, route.sent) for t in (x, weights))
        if len(x):
            x = self.kernel(x, gate_up, down, route.index, weights)
        else:
            # Experts without tokens still owe the other ranks their part of every collective of the backward pass.
            x = x + (gate_up[:0].sum() + down[:0].sum() + weights.sum()).to(x.dtype)
        x = all_to_all(x, group, route.sent, route.received)
        return _AddRows.apply(x, route.token, route.sent, len(hidden_states))

    def __repr__(self) -> str:
        return f"<expert parallel {self.kernel!r}>"


class Route(NamedTuple):
    """Which rows go where.

    Attributes:
        token: [M] int64, the token of each row sent, in order of the rank it goes to, then of token.
        sent, received: rows to and from each rank.
        index: [N, K] int32, local experts of each row received; the number of local experts where it is another rank's.
    """

    token: Tensor
    sent: list[int]
    received: list[int]
    index: Tensor


def plan_route(top_k_index: Tensor, experts: int, group: ProcessGroup) -> Route:
    """Agree with the other ranks on what travels. Synchronizes with the device once, for the sizes.

    Args:
        top_k_index: [T, K] over all experts; one that is none of them goes nowhere.
        experts: how many each rank holds.
    """
    ranks = group.size()
    owner = (top_k_index // experts).clamp(max=ranks)
    goes = owner.new_zeros(len(owner), ranks + 1, dtype=torch.bool).scatter_(1, owner, True)[:, :ranks]
    counts = goes.sum(0)
    incoming = torch.empty_like(counts)
    dist.all_to_all_single(incoming, counts, group=group)
    sent, received = torch.stack([counts, incoming]).tolist()
    rank, token = goes.t().nonzero(as_tuple=True)
    index = top_k_index[token] - rank[:, None] * experts
    index = index.masked_fill((index < 0) | (index >= experts), experts).to(torch.int32)
    return Route(token, sent, received, all_to_all(index, group, received, sent))


class _TakeRows(torch.autograd.Function):
    """x[token]; the transpose of `_AddRows`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Tensor, counts: list[int]) -> Tensor:
        ctx.save_for_backward(token)
        ctx.counts, ctx.tokens = counts, len(x)
        return x.index_select(0, token)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _add_rows(grad, ctx.saved_tensors[0], ctx.counts, ctx.tokens), None, None


class _AddRows(torch.autograd.Function):
    """The sum over each token's rows.

    Saving `token` has a second reason: activation checkpointing recomputes no further than the last saved tensor, so
    it passes through every collective on every rank, whatever the kernel saved there.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, token: Tensor, counts: list[int], tokens: int) -> Tensor:
        ctx.save_for_backward(token)
        return _add_rows(rows, token, counts, tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return grad.index_select(0, ctx.saved_tensors[0]), None, None, None


def _add_rows(rows: Tensor, token: Tensor, counts: list[int], tokens: int) -> Tensor:
    """A token has one row a rank at most, so adding rank by rank has one order, also where adding is atomic."""
    out = rows.new_zeros(tokens, *rows.shape[1:])
    for part, index in zip(rows.split(counts), token.split(counts), strict=True):
        out.index_add_(0, index, part)
    return out
