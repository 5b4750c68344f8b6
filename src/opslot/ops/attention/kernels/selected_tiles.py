"""Keys that each query sees as bits, and the tiles of queries and keys in which any bit is set.

Bit i of word w of a query, an int32, is key 32 w + i. The attention kernels read lists of tiles, so that those without
a bit cost nothing. GROUP adjacent rows of a tile, the heads of a group, have the bits of one query.
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
def selected(pointers, first, size, valid, BLOCK: tl.constexpr, GROUP: tl.constexpr = 1):
    """Whether bits `first` to `first` + BLOCK / GROUP are set in the words that begin at `pointers`: [rows, BLOCK].

    Each bit is repeated GROUP times. `first` is a multiple of BLOCK / GROUP; both are powers of two, and BLOCK may be
    less than GROUP. There are `size` bits; those of rows that are not `valid` are 0.
    """
    column = tl.arange(0, BLOCK)[None, :] // GROUP
    if BLOCK // GROUP < 32:
        word = tl.load(pointers + first // 32, mask=valid, other=0)[:, None]
        found = word & (1 << (first % 32 + column))
    else:
        for part in tl.static_range(BLOCK // GROUP // 32):
            index = first // 32 + part
            own = tl.load(pointers + index, mask=index * 32 + tl.where(valid, 0, size) < size, other=0)[:, None]
            if part == 0:
                word = own
            else:
                word = tl.where(column // 32 == part, own, word)
        # One instruction for each element, since the masks stay in registers.
        found = word & (1 << (column % 32))
    return found != 0


@triton.jit(do_not_specialize=["queries", "words", "tiles"])
def _tiles_kernel(
    bits_ptr,
    found_ptr,
    queries,
    words,
    tiles,
    TOKENS: tl.constexpr,
    TILES: tl.constexpr,
    KEYS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Whether any query of tile `program_id(0)` sees a key of each tile of keys.

    TILES adjacent tiles are of the same queries, other heads of them.
    """
    b = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) // TILES * TOKENS + tl.arange(0, TOKENS)
    bits_ptr += (b * queries + token) * words
    found_ptr += (b * tl.num_programs(0) + tl.program_id(0)) * tiles
    column = tl.arange(0, WORDS)
    for first in tl.range(0, words, WORDS):
        word = first + column
        inside = (token < queries)[:, None] & (word < words)[None, :]
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


def tiles_with_bits(bits: Tensor, keys: int, rows: int, columns: int, group: int = 1) -> Tensor:
    """Whether a bit is set in each tile of `rows` rows and `columns` keys: int8 [B, tiles of rows, of keys].

    Args:
        bits: int32 [B, S, words] for `keys` keys.
        group: rows of each query; `rows` and `group` are powers of two.
    """
    batch, queries, words = bits.shape
    found = bits.new_empty(batch, cdiv(queries * group, rows), cdiv(keys, columns), dtype=torch.int8)
    _launch_tiles(
        (found.shape[1], batch, 1),
        (bits, found),
        (),
        (queries, words, found.shape[2]),
        (max(1, rows // group), max(1, group // rows), columns, max(_WORDS, columns // 32)),
        4,
    )
    return found


@triton.jit(do_not_specialize=["rows", "size"])
def _lists_kernel(found_ptr, lists_ptr, batch_stride, row_stride, stride, rows, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    found_ptr += row // rows * batch_stride + row % rows * row_stride
    lists_ptr += row * (size + 1)
    count = tl.zeros((), dtype=tl.int32)
    for start in tl.range(0, size, BLOCK):
        tile = start + tl.arange(0, BLOCK)
        one = tl.load(found_ptr + tile.to(tl.int64) * stride, mask=tile < size, other=0).to(tl.int32)
        tl.store(lists_ptr + count + tl.cumsum(one, 0), tile, mask=one != 0)
        count += tl.sum(one, 0)
    tl.store(lists_ptr, count)


_launch_lists = KernelLauncher(_lists_kernel)


def lists_of(found: Tensor) -> Tensor:
    """The places of the ones in each row of `found` [B, M, N], in order, after their number: int32 [B, M, N + 1].

    What follows the places is undefined.
    """
    batch, rows, size = found.shape
    lists = found.new_empty(batch, rows, size + 1, dtype=torch.int32)
    block = min(1024, triton.next_power_of_2(max(16, size)))
    _launch_lists((batch * rows, 1, 1), (found, lists), found.stride(), (rows, size), (block,), 4)
    return lists


@triton.jit(do_not_specialize=["queries", "keys", "words", "turned_words"])
def _transpose_kernel(bits_ptr, out_ptr, queries, keys, words, turned_words, WORDS: tl.constexpr):
    """Word `program_id(0)` of the keys in WORDS words from `program_id(1)`: the bits of 32 queries."""
    b = tl.program_id(2).to(tl.int64)
    query = tl.program_id(0) * 32 + tl.arange(0, 32)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    inside = (query < queries)[:, None] & (word < words)[None, :]
    pointers = bits_ptr + (b * queries + query)[:, None] * words + word[None, :]
    bits = tl.load(pointers, mask=inside, other=0)
    # [queries, words, bits of a word]
    one = (bits[:, :, None] >> tl.arange(0, 32)[None, None, :]) & 1
    turned = tl.sum(one << tl.arange(0, 32)[:, None, None], 0).to(tl.int32)
    key = word[:, None] * 32 + tl.arange(0, 32)[None, :]
    tl.store(out_ptr + (b * keys + key) * turned_words + tl.program_id(0), turned, mask=key < keys)


_launch_transpose = KernelLauncher(_transpose_kernel)


def transpose_bits(bits: Tensor, keys: int) -> Tensor:
    """The queries that see each key: int32 [B, T, ceil(S / 32)] of `bits` [B, S, ceil(T / 32)]."""
    batch, queries, words = bits.shape
    found = bits.new_empty(batch, keys, cdiv(queries, 32))
    _launch_transpose(
        (found.shape[2], cdiv(words, 8), batch), (bits, found), (), (queries, keys, words, found.shape[2]), (8,), 4
    )
    return found
