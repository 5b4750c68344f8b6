"""Triton kernels of fused_triton: grouped products over rows sorted by expert (`routing.py`).

Every operand is seen as [planes, rows, columns], contiguous: weights [E, N, K] or, split into gate and up, [2E, I, H];
activations [1, R, C], and gate and up [2, R, I]. Planes keep a tile inside its own half and its own expert: what lies
outside reads as zero and is not written. `TMA` tells whether an operand is a tensor descriptor or a pointer.

A program takes tiles with a stride of the grid, so that a grid of the machine's size is persistent. Rows that fill up an
expert's last tile have slot -1; they read as zero, and so everything computed from them is zero.
"""

from __future__ import annotations

import triton
import triton.language as tl

from opslot._base.device import triton_interpreted

# Triton's interpreter multiplies the bit patterns of bf16 operands; there they are widened first.
_WIDEN = tl.constexpr(triton_interpreted())


@triton.jit
def _dot(a, b, acc):
    if _WIDEN:
        acc = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        acc = tl.dot(a, b, acc, input_precision="ieee")
    return acc


@triton.jit
def _load_tile(src, plane, row, col, rows, cols, BR: tl.constexpr, BC: tl.constexpr, TMA: tl.constexpr):
    if TMA:
        tile = src.load([plane, row, col]).reshape(BR, BC)
    else:
        r = row + tl.arange(0, BR)
        c = col + tl.arange(0, BC)
        offset = (tl.cast(plane, tl.int64) * rows + r[:, None]) * cols + c[None, :]
        tile = tl.load(src + offset, mask=(r < rows)[:, None] & (c < cols)[None, :], other=0.0)
    return tile


@triton.jit
def _store_tile(dst, plane, row, col, tile, rows, cols, BR: tl.constexpr, BC: tl.constexpr, TMA: tl.constexpr):
    if TMA:
        dst.store([plane, row, col], tile.to(dst.dtype).reshape(1, BR, BC))
    else:
        r = row + tl.arange(0, BR)
        c = col + tl.arange(0, BC)
        offset = (tl.cast(plane, tl.int64) * rows + r[:, None]) * cols + c[None, :]
        tl.store(dst + offset, tile.to(dst.dtype.element_ty), mask=(r < rows)[:, None] & (c < cols)[None, :])


@triton.jit
def _load_tokens(src, slot, col, cols, TOP_K: tl.constexpr, BC: tl.constexpr):
    """The rows of `src` [T, cols] that belong to `slot`, columns col .. col + BC; zero where slot is -1."""
    c = col + tl.arange(0, BC)
    offset = (slot // TOP_K).to(tl.int64)[:, None] * cols + c[None, :]
    return tl.load(src + offset, mask=(slot >= 0)[:, None] & (c < cols)[None, :], other=0.0)


@triton.jit
def _tile_at(tile, row_tiles, col_tiles, GROUP: tl.constexpr):
    """Row and column of a tile; GROUP rows of tiles are walked together, so that they share weights in the L2 cache."""
    group = tile // (GROUP * col_tiles)
    first = group * GROUP
    height = tl.minimum(row_tiles - first, GROUP)
    inside = tile - group * GROUP * col_tiles
    return first + inside % height, inside // height


@triton.jit
def gate_up_kernel(
    x,
    slots,
    gate_up,
    projected,
    act,
    starts,
    tile_expert,
    experts,
    rows,
    hidden,
    intermediate,
    TOP_K: tl.constexpr,
    GATHER: tl.constexpr,
    TMA: tl.constexpr,
    ALIGN: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    """projected[0] = x gate^T, projected[1] = x up^T, act = silu(gate) * up. x: [T, H] if GATHER, else [1, R, H]."""
    row_tiles = tl.load(starts + experts) // BM
    col_tiles = tl.cdiv(intermediate, BN)
    for tile in tl.range(tl.program_id(0), row_tiles * col_tiles, tl.num_programs(0), flatten=FLATTEN):
        tm, tn = _tile_at(tile, row_tiles, col_tiles, GROUP)
        expert = tl.load(tile_expert + tm * BM // ALIGN)
        row = tm * BM
        col = tn * BN
        if GATHER:
            slot = tl.load(slots + row + tl.arange(0, BM))
        gate_acc = tl.zeros((BM, BN), tl.float32)
        up_acc = tl.zeros((BM, BN), tl.float32)
        for k in range(0, hidden, BK):
            if GATHER:
                a = _load_tokens(x, slot, k, hidden, TOP_K, BK)
            else:
                a = _load_tile(x, 0, row, k, rows, hidden, BM, BK, TMA)
            g = _load_tile(gate_up, 2 * expert, col, k, intermediate, hidden, BN, BK, TMA)
            u = _load_tile(gate_up, 2 * expert + 1, col, k, intermediate, hidden, BN, BK, TMA)
            gate_acc = _dot(a, g.T, gate_acc)
            up_acc = _dot(a, u.T, up_acc)
        _store_tile(projected, 0, row, col, gate_acc, rows, intermediate, BM, BN, TMA)
        _store_tile(projected, 1, row, col, up_acc, rows, intermediate, BM, BN, TMA)
        h = gate_acc * tl.sigmoid(gate_acc) * up_acc
        _store_tile(act, 0, row, col, h, rows, intermediate, BM, BN, TMA)


@triton.jit
def rows_kernel(
    a,
    weight,
    out,
    starts,
    tile_expert,
    experts,
    rows,
    columns,
    inner,
    PLANES: tl.constexpr,
    WEIGHT_NK: tl.constexpr,
    TMA: tl.constexpr,
    ALIGN: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    """out [1, R, N] = sum over planes of a [PLANES, R, K] times weight [E * PLANES, N, K]^T or [E * PLANES, K, N]."""
    row_tiles = tl.load(starts + experts) // BM
    col_tiles = tl.cdiv(columns, BN)
    steps = tl.cdiv(inner, BK)
    for tile in tl.range(tl.program_id(0), row_tiles * col_tiles, tl.num_programs(0), flatten=FLATTEN):
        tm, tn = _tile_at(tile, row_tiles, col_tiles, GROUP)
        expert = tl.load(tile_expert + tm * BM // ALIGN)
        row = tm * BM
        col = tn * BN
        acc = tl.zeros((BM, BN), tl.float32)
        for step in range(PLANES * steps):
            plane = step // steps
            k = (step - plane * steps) * BK
            left = _load_tile(a, plane, row, k, rows, inner, BM, BK, TMA)
            if WEIGHT_NK:
                right = _load_tile(weight, expert * PLANES + plane, col, k, columns, inner, BN, BK, TMA).T
            else:
                right = _load_tile(weight, expert * PLANES + plane, k, col, inner, columns, BK, BN, TMA)
            acc = _dot(left, right, acc)
        _store_tile(out, 0, row, col, acc, rows, columns, BM, BN, TMA)


@triton.jit
def _swiglu_grad(
    act_grad,
    weight,
    projected,
    projected_grad,
    weighted_act,
    row,
    col,
    rows,
    intermediate,
    BM: tl.constexpr,
    BN: tl.constexpr,
    TMA: tl.constexpr,
):
    """One tile's share of `act_grad_kernel`'s outputs; returns the row dots of act and its gradient."""
    gate = _load_tile(projected, 0, row, col, rows, intermediate, BM, BN, TMA).to(tl.float32)
    up = _load_tile(projected, 1, row, col, rows, intermediate, BM, BN, TMA).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    act = silu * up
    _store_tile(weighted_act, 0, row, col, act * weight, rows, intermediate, BM, BN, TMA)
    dots = tl.sum(act * act_grad, 1)
    act_grad = act_grad * weight
    _store_tile(projected_grad, 1, row, col, act_grad * silu, rows, intermediate, BM, BN, TMA)
    gate_grad = act_grad * up * (sigmoid + silu * (1.0 - sigmoid))
    _store_tile(projected_grad, 0, row, col, gate_grad, rows, intermediate, BM, BN, TMA)
    return dots


@triton.jit
def act_grad_kernel(
    grad,
    slots,
    top_k_weights,
    down,
    projected,
    projected_grad,
    weighted_act,
    slot_grad,
    starts,
    tile_expert,
    experts,
    rows,
    hidden,
    intermediate,
    TOP_K: tl.constexpr,
    GATHER: tl.constexpr,
    TMA: tl.constexpr,
    ALIGN: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    """Back through the down product and SwiGLU.

    Writes projected_grad [2, R, I]; weighted_act [1, R, I] = weight * act, for down's gradient; and, for each column tile,
    the part of a routing weight's gradient that it sees: slot_grad [column tiles, R].
    """
    row_tiles = tl.load(starts + experts) // BM
    col_tiles = tl.cdiv(intermediate, BN)
    for tile in tl.range(tl.program_id(0), row_tiles * col_tiles, tl.num_programs(0), flatten=FLATTEN):
        tm, tn = _tile_at(tile, row_tiles, col_tiles, GROUP)
        expert = tl.load(tile_expert + tm * BM // ALIGN)
        row = tm * BM
        col = tn * BN
        slot = tl.load(slots + row + tl.arange(0, BM))
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(0, hidden, BK):
            if GATHER:
                a = _load_tokens(grad, slot, k, hidden, TOP_K, BK)
            else:
                a = _load_tile(grad, 0, row, k, rows, hidden, BM, BK, TMA)
            b = _load_tile(down, expert, k, col, hidden, intermediate, BK, BN, TMA)
            acc = _dot(a, b, acc)
        weight = tl.load(top_k_weights + slot, mask=slot >= 0, other=0.0).to(tl.float32)[:, None]
        # In halves: the whole tile with its five companions would not fit into registers.
        left, right = tl.split(acc.reshape(BM, 2, BN // 2).permute(0, 2, 1))
        part = _swiglu_grad(
            left, weight, projected, projected_grad, weighted_act, row, col, rows, intermediate, BM, BN // 2, TMA
        )
        part += _swiglu_grad(
            right,
            weight,
            projected,
            projected_grad,
            weighted_act,
            row,
            col + BN // 2,
            rows,
            intermediate,
            BM,
            BN // 2,
            TMA,
        )
        tl.store(slot_grad + tl.cast(tn, tl.int64) * rows + row + tl.arange(0, BM), part)


@triton.jit
def weight_grad_kernel(
    left,
    right,
    slots,
    out,
    starts,
    counts,
    groups,
    rows,
    left_columns,
    right_columns,
    PLANES: tl.constexpr,
    TOP_K: tl.constexpr,
    GATHER_LEFT: tl.constexpr,
    GATHER_RIGHT: tl.constexpr,
    TMA: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    """out [E * PLANES, M, N] = left^T right over an expert's rows; left [PLANES, R, M], right [1, R, N], or gathered [T, .]."""
    row_tiles = tl.cdiv(left_columns, BM)
    col_tiles = tl.cdiv(right_columns, BN)
    each = row_tiles * col_tiles
    for tile in tl.range(tl.program_id(0), groups * each, tl.num_programs(0), flatten=FLATTEN):
        group = tile // each
        expert = group // PLANES
        tm, tn = _tile_at(tile - group * each, row_tiles, col_tiles, GROUP)
        start = tl.load(starts + expert)
        count = tl.load(counts + expert)
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(0, count, BK):
            row = start + k
            if GATHER_LEFT or GATHER_RIGHT:
                slot = tl.load(slots + row + tl.arange(0, BK))
            if GATHER_LEFT:
                a = _load_tokens(left, slot, tm * BM, left_columns, TOP_K, BM)
            else:
                a = _load_tile(left, group - expert * PLANES, row, tm * BM, rows, left_columns, BK, BM, TMA)
            if GATHER_RIGHT:
                b = _load_tokens(right, slot, tn * BN, right_columns, TOP_K, BN)
            else:
                b = _load_tile(right, 0, row, tn * BN, rows, right_columns, BK, BN, TMA)
            acc = _dot(a.T, b, acc)
        _store_tile(out, group, tm * BM, tn * BN, acc, left_columns, right_columns, BM, BN, TMA)


@triton.jit
def gather_kernel(x, slots, out, starts, experts, hidden, TOP_K: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr):
    """out [R, H]: each row's token; zero in rows that only fill up a tile."""
    row = tl.program_id(0) * BM
    if row < tl.load(starts + experts):
        r = row + tl.arange(0, BM)
        c = tl.program_id(1) * BC + tl.arange(0, BC)
        tile = _load_tokens(x, tl.load(slots + r), tl.program_id(1) * BC, hidden, TOP_K, BC)
        tl.store(out + r.to(tl.int64)[:, None] * hidden + c[None, :], tile, mask=(c < hidden)[None, :])


@triton.jit
def combine_kernel(
    rows, places, top_k_weights, out, hidden, TOP_K: tl.constexpr, WEIGHTED: tl.constexpr, BC: tl.constexpr
):
    """out [T, H] = sum over a token's slots, in order, of (weight *) its row; slots without a row count as zero."""
    token = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    acc = tl.zeros((BC,), tl.float32)
    for choice in tl.static_range(TOP_K):
        place = tl.load(places + token * TOP_K + choice)
        live = c < tl.where(place >= 0, hidden, 0)
        term = tl.load(rows + place.to(tl.int64) * hidden + c, mask=live, other=0.0).to(tl.float32)
        if WEIGHTED:
            term *= tl.load(top_k_weights + token * TOP_K + choice).to(tl.float32)
        acc += tl.where(live, term, 0.0)
    tl.store(out + token * hidden + c, acc.to(out.dtype.element_ty), mask=c < hidden)


@triton.jit
def slot_sum_kernel(parts, places, out, slots, rows, tiles, BLOCK: tl.constexpr):
    """out [S] = the sum of `parts` [tiles, R] at each slot's row; zero for a slot without one."""
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(places + slot, mask=slot < slots, other=-1)
    acc = tl.zeros((BLOCK,), tl.float32)
    for tile in range(tiles):
        acc += tl.load(parts + tl.cast(tile, tl.int64) * rows + place, mask=place >= 0, other=0.0)
    tl.store(out + slot, acc.to(out.dtype.element_ty), mask=slot < slots)
