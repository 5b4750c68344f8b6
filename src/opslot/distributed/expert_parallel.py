"""Expert parallelism: dispatch tokens to the ranks that hold their experts, and combine the outputs.

A token is not sent once per expert: one row serves up to `width` experts of one rank and returns as their weighted
sum. `width` is the average number of a token's experts per rank, since kernels allocate `width` experts per row. With 8
experts per token on 4 ranks it is 2, which sends 0.6 of the rows and allocates 1.2 times the token-expert pairs.

Shapes: T local tokens, K experts per token, H hidden size, M rows sent, N rows received.
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
from torch.nn import functional as F

from opslot._base.device import has_package
from opslot.distributed._collectives import all_to_all
from opslot.distributed.dtensors import local_tensor
from opslot.distributed.parallel_state import get_parallel_state


class ExpertParallel:
    """A kernel of the op moe_experts for ranks that each hold some of the experts.

    Called like the kernel: `hidden_states` [T, H], the variant's weights with this rank's experts (or DTensors over
    ep), `top_k_index` [T, K] over all experts, `top_k_weights` [T, K], and the variant's other arguments, whose
    tensors are parameters of this rank's experts too; returns [T, H]. Ranks may have different numbers of tokens, also
    none, and every rank must make the call, forward and backward.

    Attributes:
        kernel: gets the received rows, with indices of local experts; an index equal to their number marks an expert of
            another rank.
    """

    def __init__(self, kernel: Callable[..., Tensor], group: ProcessGroup | None = None) -> None:
        self.kernel = kernel
        self._group = group

    def around(self, kernel: Callable[..., Tensor]) -> ExpertParallel:
        """The same for another kernel."""
        return ExpertParallel(kernel, self._group)

    # How many rows are exchanged depends on the router's choices.
    @torch.compiler.disable
    def __call__(self, hidden_states: Tensor, *arguments: Any) -> Tensor:
        # The variants have different numbers of weights, all before the indices.
        at = next(i for i, value in enumerate(arguments) if not value.is_floating_point())
        top_k_index, top_k_weights = arguments[at : at + 2]
        weights, gating = ([local_tensor(value) for value in part] for part in (arguments[:at], arguments[at + 2 :]))
        group, held = self._group or get_parallel_state().ep_group, len(weights[0])
        if group is None:
            return self.kernel(hidden_states, *weights, top_k_index, top_k_weights, *gating)
        dispatch = plan_dispatch(top_k_index, held, group)
        index, routing_weights = _Choices.apply(top_k_weights, top_k_index, held, dispatch, group)
        sent, received = dispatch.sizes.wait()
        rows = sum(sent)
        token, order = dispatch.token[:rows], dispatch.order[:rows]
        x = _TakeRows.apply(hidden_states, token, order, dispatch.first)
        x = all_to_all(x, group, received, sent)
        if len(x):
            x = self.kernel(x, *weights, index, routing_weights, *gating)
        else:
            # Without tokens, this rank must still take part in every collective of the backward pass.
            unused = [*weights, routing_weights, *(value for value in gating if isinstance(value, Tensor))]
            x = x + sum(tensor[:0].sum() for tensor in unused).to(x.dtype)
        x = all_to_all(x, group, sent, received)
        return _AddRows.apply(x, token, order, dispatch.first)

    def __repr__(self) -> str:
        return f"<expert parallel {self.kernel!r}>"


class DispatchPlan(NamedTuple):
    """Which rows are sent where. L is the maximum number of rows; rows from the M-th on are undefined.

    Attributes:
        sizes: rows to and from each rank, and so M and N, once the host has them.
        token: [L] int64, the token of each row sent, ordered by destination rank.
        order, first: int64 [L] and [T], the rows grouped by token, and the offset of each token's rows in that order.
        source: [L, width] int64, the token-expert pair (token * K + k) at each position of a sent row; T * K if empty.
        position: [T, K] int64, the inverse: row * width + index in the row; M * width or more if a pair is not sent.
    """

    sizes: _Sizes
    token: Tensor
    order: Tensor
    first: Tensor
    source: Tensor
    position: Tensor


def plan_dispatch(top_k_index: Tensor, experts: int, group: ProcessGroup) -> DispatchPlan:
    """Agree with the other ranks on what is sent.

    The host waits for the sizes only when it needs them; until then work is queued on the device in buffers of the
    maximum size.

    Args:
        top_k_index: [T, K] over all experts; pairs with other indices are not sent.
        experts: number of experts per rank.
    """
    ranks, (tokens, choices) = group.size(), top_k_index.shape
    width = math.ceil(choices / ranks)
    owner = (top_k_index // experts).clamp_(max=ranks)
    # Number of the token's earlier pairs on the same rank.
    nth = (owner[:, :, None] == owner[:, None, :]).tril(-1).sum(-1)
    # A row is a token with its first `width` pairs on a rank, or the next `width`: numbered by rank, then by which,
    # then by token; pairs without a rank come last.
    waves = math.ceil(choices / width)
    at = (owner * waves + nth // width).t()
    rows = owner.new_zeros((ranks + 1) * waves, tokens).scatter_(0, at, 1)
    sizes = _Sizes(rows.view(ranks + 1, -1)[:ranks].sum(1), group)
    row = (rows.flatten().cumsum(0) - 1).view_as(rows).gather(0, at).t()
    position = row * width + nth % width
    most = tokens * min(choices, (choices + (ranks + 1) * (width - 1)) // width)
    everything = torch.arange(position.numel(), device=position.device)
    source = position.new_full((most * width,), position.numel()).scatter_(0, position.flatten(), everything)
    # Where a row begins, its number goes to the next position of its token.
    begins = ((nth % width == 0) & (owner < ranks)).flatten()
    ends = begins.cumsum(0)
    order = position.new_empty(most + 1).scatter_(0, torch.where(begins, ends - 1, most), row.flatten())
    first = (ends - begins.to(ends.dtype)).view(tokens, choices)[:, 0]
    source = source.view(-1, width)
    return DispatchPlan(sizes, source[:, 0] // choices, order, first.contiguous(), source, position)


class _Sizes:
    """Rows to and from each rank, copied between devices and to the host asynchronously."""

    def __init__(self, leaving: Tensor, group: ProcessGroup) -> None:
        coming = torch.empty_like(leaving)
        dist.all_to_all_single(coming, leaving, group=group)
        self._sizes = torch.stack([leaving, coming])
        self._copied = None
        if self._sizes.is_cuda:
            # A copy to pageable memory would wait for all queued work.
            pinned = torch.empty(self._sizes.shape, dtype=self._sizes.dtype, pin_memory=True)
            self._sizes = pinned.copy_(self._sizes, non_blocking=True)
            self._copied = torch.cuda.current_stream().record_event()

    def wait(self) -> tuple[list[int], list[int]]:
        if self._copied is not None:
            self._copied.synchronize()
        sent, received = self._sizes.tolist()
        return sent, received


class _Choices(torch.autograd.Function):
    """Sends the local experts and routing weights of the rows in one message.

    Returns [N, width] int32 local experts, their number where a position is empty, and [N, width] weights, zero there.
    """

    @staticmethod
    def forward(
        ctx: Any, weights: Tensor, top_k_index: Tensor, experts: int, dispatch: DispatchPlan, group: ProcessGroup
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(dispatch.position)
        # The message consists of 32-bit words; 16-bit weights are upcast to float32.
        upcast = weights if weights.element_size() >= 4 else weights.float()
        index = _at(top_k_index % experts, dispatch.source, experts).to(torch.int32)
        words = torch.cat([index, _at(upcast, dispatch.source, 0).view(torch.int32)], 1)
        sent, received = dispatch.sizes.wait()
        ctx.split = group, sent, received
        words = all_to_all(words[: sum(sent)], group, received, sent)
        width = index.shape[1]
        index, bits = (part.clone(memory_format=torch.contiguous_format) for part in words.tensor_split([width], 1))
        ctx.mark_non_differentiable(index)
        return index, bits.view(upcast.dtype).to(weights.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        (position,) = ctx.saved_tensors
        group, sent, received = ctx.split
        grad = all_to_all(grad, group, sent, received)
        return _at(grad, position.clamp(max=grad.numel()), 0), None, None, None, None


def _at(values: Tensor, positions: Tensor, default: int) -> Tensor:
    """values.flatten()[positions]; `default` for the index after the last."""
    return F.pad(values.flatten(), (0, 1), value=default)[positions]


class _TakeRows(torch.autograd.Function):
    """x[token]; the transpose of `_AddRows`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Tensor, order: Tensor, first: Tensor) -> Tensor:
        ctx.save_for_backward(order, first)
        return x.index_select(0, token)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        order, first = ctx.saved_tensors
        return _sum_rows(grad.contiguous(), order, first), None, None, None


class _AddRows(torch.autograd.Function):
    """The sum over each token's rows.

    Saving `token` also makes activation checkpointing recompute every collective on every rank: it recomputes up to the
    last saved tensor, whatever the kernel saved.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, token: Tensor, order: Tensor, first: Tensor) -> Tensor:
        ctx.save_for_backward(token)
        return _sum_rows(rows, order, first)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return grad.index_select(0, ctx.saved_tensors[0]), None, None, None


def _sum_rows(rows: Tensor, order: Tensor, first: Tensor) -> Tensor:
    """`sum_rows`, on a GPU by a Triton kernel."""
    if not (rows.is_cuda and has_package("triton")):
        return sum_rows(rows, order, first)
    from opslot.distributed import triton_kernels

    return triton_kernels.sum_rows(rows, order, first)


def sum_rows(rows: Tensor, order: Tensor, first: Tensor) -> Tensor:
    """out[t] = the sum of rows[order[first[t] : first[t + 1]]], where the last token's rows end with `order`.

    In plain torch: deterministic, and accumulated in float32.

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
