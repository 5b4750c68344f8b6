"""Gradients of replicated parameters: summed over all ranks in buckets, while the backward pass computes others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from opslot._base.errors import ParallelError

# Large enough for the bandwidth of NVLink and for little work on the host, small enough to overlap all but the last.
_BUCKET_BYTES = 2**26
# Elements to which the gradients in a bucket are aligned, for vectorized kernels.
_ALIGNMENT = 64


class GradientBuckets:
    """Sums of gradients over backward passes and, when they are reduced, over all ranks of the default group.

    A rank may lack gradients that others have, such as those of a vision encoder: it adds zeros. A parameter without a
    gradient on any rank gets none. All ranks launch the same all-reduces in the same order.

    Args:
        parameters: pairs of a tensor that backward passes compute a gradient for (the leaf) and the parameter that gets
            the sum; alike on every rank, in the order of the forward pass.
        dtype: in which gradients are summed; default the leaf's.
        overlap: start the all-reduce of a bucket when its gradients are complete, instead of after the backward pass.
    """

    def __init__(self, parameters: Sequence[tuple[Tensor, Tensor]], dtype: torch.dtype | None, overlap: bool) -> None:
        self._overlap = overlap
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[Tensor, _Bucket] = {}
        # Buckets whose all-reduce has started; they start in order.
        self._started = 0
        open_ones: dict[Any, _Bucket] = {}
        # The backward pass computes the last ones first.
        for leaf, parameter in reversed(parameters):
            key = leaf.device, dtype or leaf.dtype
            bucket = open_ones.get(key)
            if bucket is None or bucket.is_full():
                bucket = open_ones[key] = _Bucket(*key)
                self._buckets.append(bucket)
            bucket.append(leaf, parameter)
            self._bucket_of[leaf] = bucket

    def begin(self) -> None:
        """A backward pass begins; the last one may have raised."""
        self._started = 0
        for bucket in self._buckets:
            bucket.arrived.clear()
            bucket.discard_started()

    def arrive(self, leaf: Tensor, reduce: bool) -> None:
        """The backward pass has computed the gradient of `leaf`.

        Args:
            reduce: whether `finish` will reduce.

        Raises:
            ParallelError: the sum that it belongs to is being reduced already.
        """
        bucket = self._bucket_of[leaf]
        if bucket.work is not None:
            raise ParallelError(
                "a parameter got a second gradient in one backward pass, after the first one was reduced",
                found=f"one of shape {tuple(leaf.shape)}, used inside and outside of checkpoints with use_reentrant",
                hint="checkpoint activations with use_reentrant=False, or set data_parallel_mode to fsdp2",
            )
        bucket.arrived.add(leaf)
        if not bucket.is_complete():
            return
        bucket.add()
        if reduce and self._overlap:
            while self._started < len(self._buckets) and self._buckets[self._started].is_complete():
                self._start_next()

    def finish(self, reduce: bool) -> None:
        """The backward pass, or without one the forward pass, is over; add the gradients of parameters if `reduce`."""
        for bucket in self._buckets[self._started :]:
            bucket.add()
        if not reduce:
            return
        while self._started < len(self._buckets):
            self._start_next()
        for bucket in self._buckets:
            bucket.assign()
        self.begin()

    def _start_next(self) -> None:
        self._buckets[self._started].start()
        self._started += 1


class _Bucket:
    """Leaves whose gradients are reduced at once, in one tensor: sums, and by leaf whether this rank has a gradient."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.leaves: list[Tensor] = []
        self.arrived: set[Tensor] = set()
        self.work: Any = None
        self._parameters: list[Tensor] = []
        self._device, self._dtype = device, dtype
        self._sizes: list[int] = []
        self._strides: list[tuple[int, ...]] = []
        self._has_gradient: list[bool] = []
        self._sums: Tensor | None = None
        self._views: list[Tensor] = []

    def append(self, leaf: Tensor, parameter: Tensor) -> None:
        self.leaves.append(leaf)
        self._parameters.append(parameter)
        self._sizes.append(-(-leaf.numel() // _ALIGNMENT) * _ALIGNMENT)
        # Those of a gradient: the leaf's where they leave no gaps.
        self._strides.append(torch.empty_like(leaf, device="meta").stride())
        self._has_gradient.append(False)

    def is_complete(self) -> bool:
        return len(self.arrived) == len(self.leaves)

    def is_full(self) -> bool:
        return sum(self._sizes) * self._dtype.itemsize >= _BUCKET_BYTES

    @torch.no_grad()
    def add(self) -> None:
        """Add the gradients of the leaves to the sums, and free them."""
        found = [i for i, leaf in enumerate(self.leaves) if leaf.grad is not None]
        gradients: list[Any] = [self.leaves[i].grad for i in found]
        if not found:
            return
        if self._sums is None:
            self._allocate(zeros=len(found) < len(self.leaves))
            torch._foreach_copy_([self._views[i] for i in found], gradients)
        else:
            torch._foreach_add_([self._views[i] for i in found], gradients)
        for i in found:
            self.leaves[i].grad = None
            self._has_gradient[i] = True

    @torch.no_grad()
    def start(self) -> None:
        """Start the all-reduce."""
        if self._sums is None:
            self._allocate(zeros=True)
        assert self._sums is not None
        flags = self._sums[-len(self.leaves) :]
        if all(self._has_gradient):
            flags.fill_(1)
        else:
            flags.copy_(torch.tensor(self._has_gradient))
        self.work = dist.all_reduce(self._sums, async_op=True)

    @torch.no_grad()
    def assign(self) -> None:
        """Wait for the all-reduce, and add its result to the gradients of the parameters."""
        self.work.wait()
        assert self._sums is not None
        are_given = self._has_gradient
        if not all(are_given):
            # Only a rank that lacks a gradient waits for the device.
            are_given = [count > 0 for count in self._sums[-len(self.leaves) :].tolist()]
        for parameter, view, is_given in zip(self._parameters, self._views, are_given, strict=True):
            if not is_given:
                continue
            if parameter.grad is None:
                parameter.grad = view.to(parameter.dtype)
            else:
                parameter.grad.add_(view)
        self._reset()

    def discard_started(self) -> None:
        """Forget the sums of an all-reduce that has started."""
        if self.work is not None:
            self.work.wait()
            self._reset()

    def _reset(self) -> None:
        self._has_gradient = [False] * len(self.leaves)
        self._sums, self._views, self.work = None, [], None

    def _allocate(self, zeros: bool) -> None:
        make = torch.zeros if zeros else torch.empty
        # After the gradients, one flag for each leaf.
        self._sums = make(sum(self._sizes) + len(self.leaves), dtype=self._dtype, device=self._device)
        parts = self._sums[: sum(self._sizes)].split(self._sizes)
        self._views = [
            part.as_strided(leaf.shape, strides)
            for part, leaf, strides in zip(parts, self.leaves, self._strides, strict=True)
        ]
