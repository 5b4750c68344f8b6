"""Experts that live on different ranks: tokens travel to them and their outputs back.

A token does not travel once to each of its experts: one row carries it to up to `width` experts of one rank, and comes
back as their weighted sum. Kernels make room for `width` experts a row, so it is what a rank has of a token's experts
on average: at 8 experts a token on 4 ranks, 2 a row, which moves 0.6 of the rows and needs room for 1.2 times the
experts chosen.

Shapes: T tokens here, K experts a token, H hidden width, M rows sent, N rows received.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

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
        route = plan_route(top_k_index, gate_up.shape[0], group)
        x = _TakeRows.apply(hidden_states, route.token, route.order, route.first)
        x = all_to_all(x, group, route.received, route.sent)
        weights = _Permute.apply(top_k_weights, route.source, route.place).view(-1, route.local_experts.shape[1])
        weights = all_to_all(weights, group, route.received, route.sent)
        if len(x):
            x = self.kernel(x, gate_up, down, route.local_experts, weights)
        else:
            # Experts without tokens still owe the other ranks their part of every collective of the backward pass.
            x = x + (gate_up[:0].sum() + down[:0].sum() + weights.sum()).to(x.dtype)
        x = all_to_all(x, group, route.sent, route.received)
        return _AddRows.apply(x, route.token, route.order, route.first)

    def __repr__(self) -> str:
        return f"<expert parallel {self.kernel!r}>"


class Route(NamedTuple):
    """Which rows go where.

    Attributes:
        token: [M] int64, the token of each row sent, in order of the rank it goes to.
        order, first: int64 [M] and [T], the rows grouped by token, and where each token's begin in that order.
        sent, received: rows to and from each rank.
        source: [M * width] int64, the choice (token * K + k) at each place of the rows sent; T * K where there is none.
        place: [T * K] int64, the inverse; M * width for a choice that goes nowhere.
        local_experts: [N, width] int32, those of each row received; their number where there is none.
    """

    token: Tensor
    order: Tensor
    first: Tensor
    sent: list[int]
    received: list[int]
    source: Tensor
    place: Tensor
    local_experts: Tensor


def plan_route(top_k_index: Tensor, experts: int, group: ProcessGroup) -> Route:
    """Agree with the other ranks on what travels. Synchronizes with the device once, for the sizes.

    Args:
        top_k_index: [T, K] over all experts; one that is none of them goes nowhere.
        experts: how many each rank holds.
    """
    ranks, (tokens, choices) = group.size(), top_k_index.shape
    width = math.ceil(choices / ranks)
    owner = (top_k_index // experts).clamp(max=ranks)
    # How many of the token's earlier choices go to the same rank.
    nth = (owner[:, :, None] == owner[:, None, :]).tril(-1).sum(-1)
    token = torch.arange(tokens, device=owner.device)[:, None].expand_as(owner)
    rows = owner.new_zeros(ranks + 1, math.ceil(choices / width), tokens)
    rows[owner, nth // width, token] = 1
    leaving = rows[:ranks].sum((1, 2))
    coming = torch.empty_like(leaving)
    dist.all_to_all_single(coming, leaving, group=group)
    sent, received = torch.stack([leaving, coming]).tolist()
    total = sum(sent)
    number = (rows.flatten().cumsum(0) - 1).view_as(rows).clamp(max=total)
    row = torch.where(owner < ranks, number[owner, nth // width, token], total).flatten()
    place = torch.where(row < total, row * width + nth.flatten() % width, total * width)

    def placed(size: int, at: Tensor, value: Tensor, default: int) -> Tensor:
        """[size] with `value` at the places `at`; one beyond the end is dropped."""
        return value.new_full((size + 1,), default).scatter_(0, at, value.flatten())[:-1]

    source = placed(total * width, place, torch.arange(place.numel(), device=place.device), place.numel())
    index = placed(total * width, place, (top_k_index - owner * experts).to(torch.int32), experts).view(-1, width)
    token = placed(total, row, token, 0)
    first = F.pad(rows[:ranks].sum((0, 1)).cumsum(0), (1, 0))[:-1]
    index = all_to_all(index, group, received, sent)
    return Route(token, token.argsort(stable=True), first, sent, received, source, place, index)


class _Permute(torch.autograd.Function):
    """x.flatten()[source], 0 where `source` is x's size; `place` is the inverse."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(place)
        ctx.shape = x.shape
        return F.pad(x.flatten(), (0, 1))[source]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return F.pad(grad, (0, 1))[ctx.saved_tensors[0]].view(ctx.shape), None, None


class _TakeRows(torch.autograd.Function):
    """x[token]; the transpose of `_AddRows`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Tensor, order: Tensor, first: Tensor) -> Tensor:
        ctx.save_for_backward(order, first)
        return x.index_select(0, token)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _add_rows(grad, *ctx.saved_tensors), None, None, None


class _AddRows(torch.autograd.Function):
    """The sum over each token's rows.

    Saving `token` has a second reason: activation checkpointing recomputes no further than the last saved tensor, so
    it passes through every collective on every rank, whatever the kernel saved there.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, token: Tensor, order: Tensor, first: Tensor) -> Tensor:
        ctx.save_for_backward(token)
        return _add_rows(rows, order, first)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return grad.index_select(0, ctx.saved_tensors[0]), None, None, None


def _add_rows(rows: Tensor, order: Tensor, first: Tensor) -> Tensor:
    """[T, H]; without atomics, in one order, and wider than 16 bits on the way."""
    if len(rows) == 0:
        return rows.new_zeros(len(first), rows.shape[1])
    return F.embedding_bag(order, rows, first, mode="sum")
