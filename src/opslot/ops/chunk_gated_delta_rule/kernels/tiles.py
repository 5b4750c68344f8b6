"""Loads and stores of tokens, chunks and states.

Tokens are [T, heads, width] with strides, T over all rows. Intermediates are stored by chunk,
[chunks * V_heads, 64, width], zero after a chunk's last token (reads, writes and values computed from them). The
table of chunks may have chunks of length 0 at its end; nothing is read or written for those.

In all kernels, no operand of a matmul is the transpose of a computed tile; it is computed transposed or stored and
loaded. Triton 3.4 and later compute wrong matmuls from such operands on Hopper
(flash-linear-attention issues 640 and 984).
"""

from __future__ import annotations

import triton
import triton.language as tl

from opslot._base.jit import downcast

# Loops have few iterations; more stages would use more shared memory, for fewer CTAs per SM.
COLUMN_STAGES = tl.constexpr(2)


@triton.jit
def load_tokens(ptr, start, length, head, token_stride, head_stride, column, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    """[CHUNK, columns] of one head from token `start` on; zero behind `length` tokens and WIDTH columns."""
    i = tl.arange(0, CHUNK)
    offset = (start + i).to(tl.int64)[:, None] * token_stride + head * head_stride + column[None, :]
    return tl.load(ptr + offset, mask=(i < length)[:, None] & (column < WIDTH)[None, :], other=0.0)


@triton.jit
def store_tokens(ptr, tile, start, length, head, column, HEADS: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    """Columns of one head into contiguous tokens [T, HEADS, WIDTH]."""
    i = tl.arange(0, CHUNK)
    offset = ((start + i).to(tl.int64)[:, None] * HEADS + head) * WIDTH + column[None, :]
    mask = (i < length)[:, None] & (column < WIDTH)[None, :]
    tl.store(ptr + offset, downcast(tile, ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_plane(ptr, index, column, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """[ROWS, columns] of plane `index` of [planes, ROWS, WIDTH]."""
    offset = (index.to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None] * WIDTH + column[None, :]
    return tl.load(ptr + offset, mask=(column < WIDTH)[None, :], other=0.0)


@triton.jit
def store_plane(ptr, tile, index, column, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    offset = (index.to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None] * WIDTH + column[None, :]
    tl.store(ptr + offset, downcast(tile, ptr.dtype.element_ty), mask=(column < WIDTH)[None, :])


@triton.jit
def load_state(ptr, index, row, column, K: tl.constexpr, V: tl.constexpr):
    """Rows and columns of state `index` of [states, K, V]."""
    offset = (index.to(tl.int64) * K + row)[:, None] * V + column[None, :]
    return tl.load(ptr + offset, mask=(row < K)[:, None] & (column < V)[None, :], other=0.0)


@triton.jit
def store_state(ptr, tile, index, row, column, K: tl.constexpr, V: tl.constexpr):
    offset = (index.to(tl.int64) * K + row)[:, None] * V + column[None, :]
    mask = (row < K)[:, None] & (column < V)[None, :]
    tl.store(ptr + offset, downcast(tile, ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_scalars(ptr, start, length, head, HEADS: tl.constexpr, ROWS: tl.constexpr):
    """float32 [ROWS] of one head of [T, HEADS]; zero behind `length` tokens."""
    i = tl.arange(0, ROWS)
    offset = (start + i).to(tl.int64) * HEADS + head
    return tl.load(ptr + offset, mask=i < length, other=0.0).to(tl.float32)


@triton.jit
def decay(row_cumulated, column_cumulated, kept):
    """exp(rows - columns) where `kept`, else 0."""
    return tl.exp(tl.where(kept, row_cumulated[:, None] - column_cumulated[None, :], float("-inf")))
