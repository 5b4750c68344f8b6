"""Offsets of the chunks of all documents, computed on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from opslot._base.kernel_launch import KernelLauncher, cdiv


@triton.jit(do_not_specialize=["documents", "chunks"])
def chunk_table_kernel(
    cu_seqlens_ptr,
    first_chunk_ptr,
    start_ptr,
    length_ptr,
    documents,
    chunks,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    DOCUMENTS: tl.constexpr,
):
    """First token and length of every chunk, and the first chunk of every document ([documents + 1])."""
    chunk = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    document = tl.zeros((ROWS,), dtype=tl.int32)
    before = tl.zeros((ROWS,), dtype=tl.int32)
    total = tl.sum(document)
    if tl.program_id(0) == 0:
        tl.store(first_chunk_ptr, 0)
    for base in range(0, documents, DOCUMENTS):
        d = base + tl.arange(0, DOCUMENTS)
        inside = d < documents
        begin = tl.load(cu_seqlens_ptr + d, mask=inside, other=0).to(tl.int32)
        end = tl.load(cu_seqlens_ptr + d + 1, mask=inside, other=0).to(tl.int32)
        count = (end - begin + (CHUNK - 1)) // CHUNK
        last = total + tl.cumsum(count, 0)
        if tl.program_id(0) == 0:
            tl.store(first_chunk_ptr + d + 1, last, mask=inside)
        passed = (last[None, :] <= chunk[:, None]) & inside[None, :]
        document += tl.sum(passed.to(tl.int32), 1)
        before += tl.sum(tl.where(passed, count[None, :], 0), 1)
        total += tl.sum(count)
    real = document < documents
    start = tl.load(cu_seqlens_ptr + document, mask=real, other=0).to(tl.int32) + (chunk - before) * CHUNK
    stop = tl.load(cu_seqlens_ptr + document + 1, mask=real, other=0).to(tl.int32)
    tl.store(start_ptr + chunk, start, mask=chunk < chunks)
    tl.store(length_ptr + chunk, tl.where(real, tl.minimum(stop - start, CHUNK), 0), mask=chunk < chunks)


_launch_chunk_table = KernelLauncher(chunk_table_kernel)


@dataclass(frozen=True)
class Chunks:
    """The table of chunks.

    Attributes:
        cu_seqlens: [documents + 1].
        first: int32 [documents + 1], the first chunk of each document.
        start, length: int32 [count], first token and number of tokens of each chunk; trailing ones may have none.
    """

    cu_seqlens: Tensor
    first: Tensor
    start: Tensor
    length: Tensor
    count: int
    documents: int

    @property
    def table(self) -> tuple[Tensor, Tensor]:
        """First token and length of each chunk."""
        return self.start, self.length

    @property
    def bounds(self) -> tuple[Tensor, Tensor]:
        """What gives each document's chunks."""
        return self.cu_seqlens, self.first


def count_chunks(documents: int | None, batch: int, length: int, chunk: int) -> int:
    """Chunks of `batch` rows of `length` tokens; of `documents` in one row, the most that they may have."""
    if documents is None:
        return batch * cdiv(length, chunk)
    # Each document may end with a chunk of one token.
    return min((length + (chunk - 1) * documents) // chunk, length)


def chunk_table(cu_seqlens: Tensor | None, batch: int, length: int, device: torch.device, chunk: int) -> Chunks:
    """The chunks of `batch` rows of `length` tokens, or of the documents between `cu_seqlens` [documents + 1].

    Args:
        chunk: tokens of a chunk; the last one of a document may have fewer.
    """
    if cu_seqlens is None:
        documents, count = batch, count_chunks(None, batch, length, chunk)
        cu_seqlens = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=device)
    else:
        documents = cu_seqlens.numel() - 1
        count = count_chunks(documents, batch, length, chunk)
        cu_seqlens = cu_seqlens.contiguous()
    first = torch.empty(documents + 1, dtype=torch.int32, device=device)
    start, tokens = (torch.empty(count, dtype=torch.int32, device=device) for _ in range(2))
    rows = 32
    _launch_chunk_table(
        (cdiv(count, rows), 1, 1), (cu_seqlens, first, start, tokens), (), (documents, count), (chunk, rows, 128), 4
    )
    return Chunks(cu_seqlens, first, start, tokens, count, documents)
