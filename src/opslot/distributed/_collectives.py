"""Collectives with gradients: all-gather, and all-to-all, synchronous or overlapped.

The loss is the sum of the ranks' losses. So the backward of an all-gather is a summing reduce-scatter, and gradients
are not divided by the size of a group.
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
    """All-to-all along dim 0 over `group`.

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


class AsyncAllToAll:
    """Handle of an even all-to-all that is running; `wait()` returns its result.

    In the backward pass the gradients' all-to-all starts where `wait` was called and is awaited where this handle was
    created, so it overlaps with the computation in between.
    """

    def __init__(self, x: Tensor, group: ProcessGroup) -> None:
        self._transfer = _Transfer(group)
        self._out = _Start.apply(x, self._transfer)

    @property
    def pending(self) -> Tensor:
        """The uninitialized buffer of the result, without gradient."""
        return self._out.detach()

    def wait(self) -> Tensor:
        return _Wait.apply(self._out, self._transfer)


class _Transfer:
    """State shared by the start and the end of an all-to-all."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.work: Work | None = None
        self.source: Tensor | None = None

    def start(self, x: Tensor) -> Tensor:
        self.source = x.contiguous()
        out = torch.empty_like(self.source)
        self.work = dist.all_to_all_single(out, self.source, group=self.group, async_op=True)
        return out

    def wait(self) -> None:
        assert self.work is not None, "an all-to-all is awaited once"
        self.work.wait()
        self.work = self.source = None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, received: list[int] | None, sent: list[int] | None) -> Tensor:
        ctx.split = group, received, sent
        rows = len(x) if received is None else sum(received)
        out = x.new_empty((rows, *x.shape[1:]))
        dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        group, received, sent = ctx.split
        return all_to_all(grad, group, sent, received), None, None, None


class _Start(torch.autograd.Function):
    """Starts the transfer; its backward waits for the gradients'. The output must not be read before `_Wait`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, transfer: _Transfer) -> Tensor:
        ctx.transfer = transfer
        return transfer.start(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.transfer.wait()
        return grad, None


class _Wait(torch.autograd.Function):
    """Waits for the transfer; its backward starts the gradients'."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, transfer: _Transfer) -> Tensor:
        ctx.transfer = transfer
        transfer.wait()
        return out.view_as(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.transfer.start(grad), None


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
