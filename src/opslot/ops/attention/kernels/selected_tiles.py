"""Keys that each query sees as bits, and the tiles of queries and keys in which any bit is set.

Bit i of word w of a query, an int32, is key 32 w + i. The attention kernels read lists of tiles, so that those without
a bit cost nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from opslot._base.kernel_launch import KernelLauncher, cdiv

_WORDS = 32


@triton.jit
def tile_list(tiles_ptr, tile, size):
    """The list of `tile` among lists of up to `size` tiles, and how many are in it; their number comes first."""
    tiles_ptr += tile.to(tl.int64) * (size + 1)
    return tiles_ptr + 1, tl.load(tiles_ptr)


@triton.jit
def selected(pointers, first_key, keys, valid, BLOCK: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Which of BLOCK keys from `first_key` the queries see whose words begin at `pointers`: [queries, BLOCK].

    `first_key` is a multiple of BLOCK, a power of two. With TRANSPOSED, [BLOCK, queries].
    """
    column = tl.arange(0, BLOCK)
    column = column[:, None] if TRANSPOSED else column[None, :]
    if BLOCK < 32:
        word = tl.load(pointers + first_key // 32, mask=valid, other=0)
        word = word[None, :] if TRANSPOSED else word[:, None]
        found = word >> (first_key % 32 + column)
    else:
        for part in tl.static_range(BLOCK // 32):
            index = first_key // 32 + part
            word = tl.load(pointers + index, mask=index * 32 + tl.where(valid, 0, keys) < keys, other=0)
            word = word[None, :] if TRANSPOSED else word[:, None]
            if part == 0:
                found = word >> (column % 32)
            else:
                found = tl.where(column // 32 == part, word >> (column % 32), found)
    return (found & 1) != 0


@triton.jit(do_not_specialize=["queries", "words", "tiles"])
def _tiles_kernel(
    bits_ptr,
    found_ptr,
    queries,
    words,
    tiles,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    TOKENS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Whether any query of tile `program_id(0)` sees a key of each tile of keys."""
    b = tl.program_id(1).to(tl.int64)
    first_row = tl.program_id(0) * ROWS
    last = (tl.minimum(first_row + ROWS, queries * GROUP) - 1) // GROUP
    token = first_row // GROUP + tl.arange(0, TOKENS)
    bits_ptr += (b * queries + token) * words
    found_ptr += (b * tl.num_programs(0) + tl.program_id(0)) * tiles
    column = tl.arange(0, WORDS)
    for first in tl.range(0, words, WORDS):
        word = first + column
        inside = (token <= last)[:, None] & (word < words)[None, :]
        bits = tl.load(bits_ptr[:, None] + word[None, :], mask=inside, other=0)
        if KEYS < 32:
            for part in tl.static_range(32 // KEYS):
                seen = tl.max((((bits >> (part * KEYS)) & ((1 << KEYS) - 1)) != 0).to(tl.int32), 0)
                tile = word * (32 // KEYS) + part
                tl.store(found_ptr + tile, seen, mask=tile < tiles)
        else:
            seen = tl.max((bits != 0).to(tl.int32), 0)
            seen = tl.max(tl.reshape(seen, (WORDS * 32 // KEYS, KEYS // 32)), 1)
            tile = first * 32 // KEYS + tl.arange(0, WORDS * 32 // KEYS)
            tl.store(found_ptr + tile, seen, mask=tile < tiles)


_launch_tiles = KernelLauncher(_tiles_kernel)


def tiles_with_bits(bits: Tensor, keys: int, group: int, rows: int, columns: int) -> Tensor:
    """Whether a bit is set in each tile of `rows` rows and `columns` keys: int8 [B, tiles of rows, tiles of keys].

    Args:
        bits: int32 [B, S, words] for `keys` keys.
        group: rows of a token, the query heads of a key/value head.
    """
    batch, queries, words = bits.shape
    found = bits.new_empty(batch, cdiv(queries * group, rows), cdiv(keys, columns), dtype=torch.int8)
    tokens = triton.next_power_of_2(rows if group == 1 else cdiv(rows, group) + 1)
    _launch_tiles(
        (found.shape[1], batch, 1),
        (bits, found),
        (),
        (queries, words, found.shape[2]),
        (group, rows, columns, tokens, max(_WORDS, columns // 32)),
        4,
    )
    return found


def lists_of(found: Tensor) -> Tensor:
    """The places of the ones in each row of `found` [..., N], in order, after their number: int32 [..., N + 1]."""
    order = found.argsort(dim=-1, descending=True, stable=True)
    return torch.cat([found.sum(-1, keepdim=True), order], -1).to(torch.int32)
