"""Loads and stores of tokens, chunks and states.

Tokens are [T, heads, width] with strides, T over all rows. Intermediates are stored by chunk and head: planes
[chunks * heads, rows, columns], of which those with a column per token are zero after a chunk's last token. The table
of chunks may have chunks of length 0 at its end; nothing is read or written for those.

In all kernels, no operand of a matmul is the transpose of a computed tile; it is computed transposed or stored and
loaded. Triton 3.4 and later compute wrong matmuls from such operands on Hopper
(flash-linear-attention issues 640 and 984).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from opslot._base.jit import downcast

# fp32 accuracy on tensor cores; Triton has it for NVIDIA GPUs.
FP32_DOT = tl.constexpr("ieee" if torch.version.hip else "tf32x3")


def as_tokens(x: Tensor) -> Tensor:
    """[B, S, heads, width] as [B * S, heads, width] with adjacent columns: a view where the strides have one."""
    rows = x.reshape(-1, *x.shape[2:])
    return rows if rows.stride(2) == 1 else rows.contiguous()


def strides(*tensors: Tensor) -> tuple[int, ...]:
    """Token and head strides of each tensor [T, heads, width]."""
    return tuple(stride for x in tensors for stride in x.stride()[:2])


@triton.jit
def dot_fp32(a, b, acc):
    """acc + a b of fp32 operands, for small tiles."""
    return tl.dot(a, b, acc, input_precision=FP32_DOT)


@triton.jit
def load_tokens(ptr, start, length, head, token_stride, head_stride, column, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    """[CHUNK, columns] of one head from token `start` on; zero behind `length` tokens and WIDTH columns."""
    i = tl.arange(0, CHUNK)
    offset = (start + i).to(tl.int64)[:, None] * token_stride + head * head_stride + column[None, :]
    return tl.load(ptr + offset, mask=(i < length)[:, None] & (column < WIDTH)[None, :], other=0.0)


@triton.jit
def load_tokens_transposed(
    ptr, start, length, head, token_stride, head_stride, column, WIDTH: tl.constexpr, CHUNK: tl.constexpr
):
    """`load_tokens` as [columns, CHUNK]."""
    i = tl.arange(0, CHUNK)
    offset = (start + i).to(tl.int64)[None, :] * token_stride + head * head_stride + column[:, None]
    return tl.load(ptr + offset, mask=(i < length)[None, :] & (column < WIDTH)[:, None], other=0.0)


@triton.jit
def store_tokens(ptr, tile, start, length, head, column, HEADS: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    """Columns of one head into contiguous tokens [T, HEADS, WIDTH]."""
    i = tl.arange(0, CHUNK)
    offset = ((start + i).to(tl.int64)[:, None] * HEADS + head) * WIDTH + column[None, :]
    mask = (i < length)[:, None] & (column < WIDTH)[None, :]
    tl.store(ptr + offset, downcast(tile, ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_plane(ptr, index, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows and columns of plane `index` of [planes, ROWS, COLUMNS]."""
    offset = (index.to(tl.int64) * ROWS + row)[:, None] * COLUMNS + column[None, :]
    return tl.load(ptr + offset, mask=(row < ROWS)[:, None] & (column < COLUMNS)[None, :], other=0.0)


@triton.jit
def store_plane(ptr, tile, index, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    offset = (index.to(tl.int64) * ROWS + row)[:, None] * COLUMNS + column[None, :]
    mask = (row < ROWS)[:, None] & (column < COLUMNS)[None, :]
    tl.store(ptr + offset, downcast(tile, ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_plane_transposed(ptr, index, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """`load_plane` as [columns, rows]."""
    offset = (index.to(tl.int64) * ROWS + row)[None, :] * COLUMNS + column[:, None]
    return tl.load(ptr + offset, mask=(row < ROWS)[None, :] & (column < COLUMNS)[:, None], other=0.0)


@triton.jit
def store_plane_transposed(ptr, tile, index, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Store a tile [columns, rows]."""
    offset = (index.to(tl.int64) * ROWS + row)[None, :] * COLUMNS + column[:, None]
    mask = (row < ROWS)[None, :] & (column < COLUMNS)[:, None]
    tl.store(ptr + offset, downcast(tile, ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_scalars(ptr, start, length, head, HEADS: tl.constexpr, ROWS: tl.constexpr):
    """float32 [ROWS] of one head of [T, HEADS]; zero behind `length` tokens."""
    i = tl.arange(0, ROWS)
    offset = (start + i).to(tl.int64) * HEADS + head
    return tl.load(ptr + offset, mask=i < length, other=0.0).to(tl.float32)


@triton.jit
def load_segment(cu_seqlens_ptr, first_chunk_ptr, document, segment, segments, CHUNK: tl.constexpr):
    """First token, document's end, first chunk and number of chunks of one of `segments` equal parts of a document."""
    begin = tl.load(cu_seqlens_ptr + document).to(tl.int32)
    end = tl.load(cu_seqlens_ptr + document + 1).to(tl.int32)
    first = tl.load(first_chunk_ptr + document)
    count = tl.load(first_chunk_ptr + document + 1) - first
    each = (count + segments - 1) // segments
    skipped = tl.minimum(segment * each, count)
    return begin + skipped * CHUNK, end, first + skipped, tl.minimum(each, count - skipped)


@triton.jit
def decay(row_cumulated, column_cumulated, kept):
    """exp(rows - columns) where `kept`, else 0."""
    return tl.exp(tl.where(kept, row_cumulated[:, None] - column_cumulated[None, :], float("-inf")))
