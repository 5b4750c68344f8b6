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

    Called like the kernel: `hidden_states` [T, H], the variant's weights with this rank's experts (or DTensors over
    ep), `top_k_index` [T, K] over all experts, `top_k_weights` [T, K], and whatever else its variant takes, of which
    tensors are parameters of this rank's experts too; returns [T, H]. Ranks may bring any number of tokens, none
    included, and every rank must make the call, forward and backward.

    Attributes:
        kernel: gets the rows that came here, with indices of local experts; an index equal to their number marks an
            expert of another rank.
        add: adds up each token's rows, as `sum_rows` does, which is the default.
    """

    def __init__(
        self,
        kernel: Callable[..., Tensor],
        group: ProcessGroup | None = None,
        add: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None,
    ) -> None:
        self.kernel = kernel
        self.add = add or sum_rows
        self._group = group

    def __call__(self, hidden_states: Tensor, *arguments: Any) -> Tensor:
        # Variants differ in how many weights they have; all come before the indices.
        at = next(i for i, value in enumerate(arguments) if not value.is_floating_point())
        top_k_index, top_k_weights = arguments[at : at + 2]
        weights, gating = ([_local(value) for value in part] for part in (arguments[:at], arguments[at + 2 :]))
        group, held = self._group or get_parallel_state().ep_group, len(weights[0])
        if group is None:
            return self.kernel(hidden_states, *weights, top_k_index, top_k_weights, *gating)
        route = plan_route(top_k_index, held, group)
        index, routing_weights = _Choices.apply(top_k_weights, top_k_index, held, route, group)
        sent, received = route.sizes.wait()
        rows = sum(sent)
        token, order = route.token[:rows], route.order[:rows]
        x = _TakeRows.apply(hidden_states, token, order, route.first, self.add)
        x = all_to_all(x, group, received, sent)
        if len(x):
            x = self.kernel(x, *weights, index, routing_weights, *gating)
        else:
            # Experts without tokens still owe the other ranks their part of every collective of the backward pass.
            owed = [*weights, routing_weights, *(value for value in gating if isinstance(value, Tensor))]
            x = x + sum(tensor[:0].sum() for tensor in owed).to(x.dtype)
        x = all_to_all(x, group, sent, received)
        return _AddRows.apply(x, token, order, route.first, self.add)

    def __repr__(self) -> str:
        return f"<expert parallel {self.kernel!r}>"


def _local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


class Route(NamedTuple):
    """Which rows go where. L is as many rows as could be needed; those from the M-th on mean nothing.

    Attributes:
        sizes: rows to and from each rank, and so M and N, once they are known here.
        token: [L] int64, the token of each row sent, in order of the rank it goes to.
        order, first: int64 [L] and [T], the rows grouped by token, and where each token's begin in that order.
        source: [L, width] int64, the choice (token * K + k) at each place of the rows sent; T * K where there is none.
        place: [T, K] int64, the inverse: row * width + place in it; M * width or more for a choice that goes nowhere.
    """

    sizes: _Sizes
    token: Tensor
    order: Tensor
    first: Tensor
    source: Tensor
    place: Tensor


def plan_route(top_k_index: Tensor, experts: int, group: ProcessGroup) -> Route:
    """Agree with the other ranks on what travels.

    The host has to know the sizes, which it waits for when it needs them; what is computed here and next is queued on
    the device by then, in buffers as large as could be needed.

    Args:
        top_k_index: [T, K] over all experts; one that is none of them goes nowhere.
        experts: how many each rank holds.
    """
    ranks, (tokens, choices) = group.size(), top_k_index.shape
    width = math.ceil(choices / ranks)
    owner = (top_k_index // experts).clamp_(max=ranks)
    # How many of the token's earlier choices go to the same rank.
    nth = (owner[:, :, None] == owner[:, None, :]).tril(-1).sum(-1)
    # A row is a token with its first `width` choices at a rank, or the next `width`: numbered by rank, then by which,
    # then by token, and those of no rank last.
    waves = math.ceil(choices / width)
    at = (owner * waves + nth // width).t()
    rows = owner.new_zeros((ranks + 1) * waves, tokens).scatter_(0, at, 1)
    sizes = _Sizes(rows.view(ranks + 1, -1)[:ranks].sum(1), group)
    row = (rows.flatten().cumsum(0) - 1).view_as(rows).gather(0, at).t()
    place = row * width + nth % width
    most = tokens * min(choices, (choices + (ranks + 1) * (width - 1)) // width)
    everything = torch.arange(place.numel(), device=place.device)
    source = place.new_full((most * width,), place.numel()).scatter_(0, place.flatten(), everything)
    # Where a row begins, and so once for each: its number goes to the next place of its token.
    begins = ((nth % width == 0) & (owner < ranks)).flatten()
    ends = begins.cumsum(0)
    order = place.new_empty(most + 1).scatter_(0, torch.where(begins, ends - 1, most), row.flatten())
    first = (ends - begins.to(ends.dtype)).view(tokens, choices)[:, 0]
    source = source.view(-1, width)
    return Route(sizes, source[:, 0] // choices, order, first.contiguous(), source, place)


class _Sizes:
    """Rows to and from each rank, on their way from device to device and to the host."""

    def __init__(self, leaving: Tensor, group: ProcessGroup) -> None:
        coming = torch.empty_like(leaving)
        dist.all_to_all_single(coming, leaving, group=group)
        self._sizes = torch.stack([leaving, coming])
        self._arrived = None
        if self._sizes.is_cuda:
            # Into pageable memory the host would wait for all that the device has still to do.
            pinned = torch.empty(self._sizes.shape, dtype=self._sizes.dtype, pin_memory=True)
            self._sizes = pinned.copy_(self._sizes, non_blocking=True)
            self._arrived = torch.cuda.current_stream().record_event()

    def wait(self) -> tuple[list[int], list[int]]:
        if self._arrived is not None:
            self._arrived.synchronize()
        sent, received = self._sizes.tolist()
        return sent, received


class _Choices(torch.autograd.Function):
    """What travels beside the rows, in one message: their local experts and routing weights.

    Returns [N, width] int32 local experts, their number where there is none, and [N, width] weights, there zero.
    """

    @staticmethod
    def forward(
        ctx: Any, weights: Tensor, top_k_index: Tensor, experts: int, route: Route, group: ProcessGroup
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(route.place)
        # The message is made of 32-bit words, which hold a narrower weight as float32 without loss.
        wide = weights if weights.element_size() >= 4 else weights.float()
        index = _at(top_k_index % experts, route.source, experts).to(torch.int32)
        words = torch.cat([index, _at(wide, route.source, 0).view(torch.int32)], 1)
        sent, received = route.sizes.wait()
        ctx.exchange = group, sent, received
        words = all_to_all(words[: sum(sent)], group, received, sent)
        width = index.shape[1]
        index, bits = (part.clone(memory_format=torch.contiguous_format) for part in words.tensor_split([width], 1))
        ctx.mark_non_differentiable(index)
        return index, bits.view(wide.dtype).to(weights.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        (place,) = ctx.saved_tensors
        group, sent, received = ctx.exchange
        grad = all_to_all(grad, group, sent, received)
        return _at(grad, place.clamp(max=grad.numel()), 0), None, None, None, None


def _at(values: Tensor, places: Tensor, default: int) -> Tensor:
    """values.flatten()[places], `default` at the place after its last."""
    return F.pad(values.flatten(), (0, 1), value=default)[places]


class _TakeRows(torch.autograd.Function):
    """x[token]; the transpose of `_AddRows`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Tensor, order: Tensor, first: Tensor, add: Callable[..., Tensor]) -> Tensor:
        ctx.save_for_backward(order, first)
        ctx.add = add
        return x.index_select(0, token)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return ctx.add(grad.contiguous(), *ctx.saved_tensors), None, None, None, None


class _AddRows(torch.autograd.Function):
    """The sum over each token's rows.

    Saving `token` has a second reason: activation checkpointing recomputes no further than the last saved tensor, so
    it passes through every collective on every rank, whatever the kernel saved there.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, token: Tensor, order: Tensor, first: Tensor, add: Callable[..., Tensor]
    ) -> Tensor:
        ctx.save_for_backward(token)
        return add(rows, order, first)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return grad.index_select(0, ctx.saved_tensors[0]), None, None, None, None


def sum_rows(rows: Tensor, order: Tensor, first: Tensor) -> Tensor:
    """out[t] = the sum of rows[order[first[t] : first[t + 1]]], the last token's going on to the end of `order`.

    In plain torch; without atomics, in one order, and wider than 16 bits on the way.

    Args:
        rows: [M, H], contiguous.
        order: int64 [M].
        first: int64 [T], not descending.

    Returns:
        [T, H] like `rows`; zero for a token without rows.
    """
    if len(rows) == 0:
        return rows.new_zeros(len(first), rows.shape[1])
    return F.embedding_bag(order, rows, first, mode="sum")
