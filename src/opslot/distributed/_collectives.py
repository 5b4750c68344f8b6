"""Collectives with gradients: all-gather, and all-to-all that finishes at once or while something else is computed.

Gradients follow one rule everywhere in this room: the loss is the sum of the ranks' losses. So the gradient of a copy
is the sum over its readers, an all-gather's backward is a summing reduce-scatter, and nothing is divided by a group's
size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup, Work


def all_to_all(
    x: Tensor, group: ProcessGroup, received: list[int] | None = None, sent: list[int] | None = None
) -> Tensor:
    """Send slices of `x` along dim 0 to the ranks of `group`, in order, and concatenate what comes from them.

    Args:
        x: [sum(sent), ...].
        received, sent: rows from and to each rank; None splits evenly.

    Returns:
        [sum(received), ...].
    """
    return _AllToAll.apply(x, group, received, sent)


def all_gather(x: Tensor, group: ProcessGroup) -> Tensor:
    """[ranks, *x.shape]: every rank's `x`, which all have one shape."""
    return _Gather.apply(x, group)


class Exchange:
    """An even all-to-all under way: `finish()` gives its result.

    The backward pass mirrors it: the gradients' transfer begins where `finish` was called and is awaited where the
    exchange began, so what was computed in between is computed during both transfers.
    """

    def __init__(self, x: Tensor, group: ProcessGroup) -> None:
        self._flight = _Flight(group)
        self._out = _Begin.apply(x, self._flight)

    @property
    def pending(self) -> Tensor:
        """The memory of the result, which is not there yet; without gradient."""
        return self._out.detach()

    def finish(self) -> Tensor:
        return _Finish.apply(self._out, self._flight)


class _Flight:
    """What the two ends of an exchange share."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.work: Work | None = None
        self.source: Tensor | None = None

    def begin(self, x: Tensor) -> Tensor:
        self.source = x.contiguous()
        out = torch.empty_like(self.source)
        self.work = dist.all_to_all_single(out, self.source, group=self.group, async_op=True)
        return out

    def end(self) -> None:
        assert self.work is not None, "an exchange is awaited once"
        self.work.wait()
        self.work = self.source = None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, received: list[int] | None, sent: list[int] | None) -> Tensor:
        ctx.exchange = group, received, sent
        rows = len(x) if received is None else sum(received)
        out = x.new_empty((rows, *x.shape[1:]))
        dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        group, received, sent = ctx.exchange
        return all_to_all(grad, group, sent, received), None, None, None


class _Begin(torch.autograd.Function):
    """Begins the transfer; its backward awaits the gradients'. The output must not be read before `_Finish`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, flight: _Flight) -> Tensor:
        ctx.flight = flight
        return flight.begin(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.flight.end()
        return grad, None


class _Finish(torch.autograd.Function):
    """Awaits the transfer; its backward begins the gradients'."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, flight: _Flight) -> Tensor:
        ctx.flight = flight
        flight.end()
        return out.view_as(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.flight.begin(grad), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        out = x.new_empty((group.size(), *x.shape))
        dist.all_gather(list(out), x.contiguous(), group=group)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        out = grad.new_empty(grad.shape[1:])
        dist.reduce_scatter(out, list(grad.contiguous()), group=ctx.group)
        return out, None
