"""Chunks of packed documents for references in plain torch: those of all documents in parallel, step by step.

Shape suffixes of users: N chunks, D documents, H heads, T tokens of a chunk.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from opslot.ops._common.contract import takes


class ChunkSchedule:
    """Chunks of all documents, in the order in which their states need them.

    Args:
        batch, length: rows, and tokens of a row.
        cu_seqlens: boundaries of the documents over all tokens; None for rows of one document each.
        chunk: tokens of a chunk.

    Attributes:
        order: documents, those of most chunks first.
        active: by step, how many documents (of `order`) have a chunk left; the chunks of a step are adjacent.
    """

    def __init__(self, batch: int, length: int, cu_seqlens: Tensor | None, chunk: int, device: torch.device) -> None:
        self.chunk = chunk
        # len(range(n)) makes a symbolic n of torch.compile a number, which the number of chunks requires.
        bounds = [len(range(length * i)) for i in range(batch + 1)] if cu_seqlens is None else cu_seqlens.tolist()
        counts = [-(-(stop - start) // chunk) for start, stop in itertools.pairwise(bounds)]
        order = sorted(range(len(counts)), key=lambda d: -counts[d])
        self.active = [sum(c > step for c in counts) for step in range(max(counts, default=0))]
        firsts = [bounds[d] + step * chunk for step, n in enumerate(self.active) for d in order[:n]]
        stops = [bounds[d + 1] for n in self.active for d in order[:n]]
        self.order = torch.tensor(order, dtype=torch.int64, device=device)
        first, stop = torch.tensor([firsts, stops], dtype=torch.int64, device=device)[..., None]
        index = first + torch.arange(chunk, device=device)
        self.total = bounds[-1]
        # Padding positions read a row of zeros after the last token, which neither decays the state nor adds to it.
        self.source = index.where(index < stop, self.total).flatten()
        inverse_index = self.source.new_empty(self.total + 1)
        inverse_index[self.source] = torch.arange(self.source.numel(), device=device)
        self.inverse_index = inverse_index[:-1]

    def chunks(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """[B, S, heads, width] -> [N, heads, T, width] in `dtype`."""
        flat = x.reshape(self.total, *x.shape[2:]).to(dtype)
        return _Move.apply(flat, self.source, self.inverse_index).view(-1, self.chunk, *flat.shape[1:]).transpose(1, 2)

    def tokens(self, x: Tensor) -> Tensor:
        """[N, heads, T, width] -> [B * S, heads, width]."""
        return _Move.apply(x.transpose(1, 2).flatten(0, 1), self.inverse_index, self.source)


class _Move(torch.autograd.Function):
    """Rows of `x` at `index`, zeros for the index one past the end; `inverse` is the inverse index.

    No row occurs twice, so backward is also a gather; that of indexing would use atomics.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return _taken(x, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _taken(grad, *ctx.saved_tensors), None, None


def _taken(x: Tensor, index: Tensor) -> Tensor:
    return torch.cat([x, x.new_zeros(1, *x.shape[1:])])[index]


def step_slices(sizes: list[int]) -> list[slice]:
    """The chunks of each step, of which `sizes` has the number."""
    return [slice(stop - size, stop) for size, stop in zip(sizes, itertools.accumulate(sizes), strict=True)]


def as_kernel(arguments: Callable[..., Any], reference: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel `torch_chunked` of a reference whose `arguments` are a NamedTuple.

    The chunks of packed documents depend on their lengths, so torch.compile runs them between two graphs.
    """
    packed = torch.compiler.disable(reference, reason="torch_chunked reads the lengths of packed documents")

    @takes(arguments)
    def kernel(given: Any) -> Any:
        return (reference if given.cu_seqlens is None else packed)(*given)

    return kernel
