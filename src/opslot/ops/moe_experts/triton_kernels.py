"""Triton kernels of fused_triton: grouped GEMMs over rows sorted by expert (`routing.py`).

Every operand is contiguous [planes, rows, columns]: weights [E, N, K] or, as gate and up, [2E, I, H]; activations
[1, R, C]; gate and up [2, R, I]. A tile never crosses a plane: elements outside read as zero and are not written. With
`TMA` operands are tensor descriptors, otherwise pointers.

Grids are persistent: each program takes every num_programs-th tile. Rows that pad an expert's last tile have pair -1;
they read as zero and have routing weight zero, so they add nothing to gradients. `TRANSPOSED` weights are [E, K, N],
gate columns first; `BIASED` ones have interleaved gate and up columns.
"""

from __future__ import annotations

import triton
import triton.language as tl

from opslot._base.jit import dot_of_block, downcast
from opslot.ops._common.triton_activations import activation, activation_and_slope, is_below_limit


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
def _load_pair(src, plane, row, col, rows, cols, BR: tl.constexpr, BC: tl.constexpr, TMA: tl.constexpr):
    """The same tile of planes `plane` and `plane + 1`, concatenated: [2 * BR, BC]."""
    if TMA:
        tile = src.load([plane, row, col]).reshape(2 * BR, BC)
    else:
        i = tl.arange(0, 2 * BR)
        r = row + i % BR
        c = col + tl.arange(0, BC)
        offset = ((plane + i // BR).to(tl.int64) * rows + r)[:, None] * cols + c[None, :]
        tile = tl.load(src + offset, mask=(r < rows)[:, None] & (c < cols)[None, :], other=0.0)
    return tile


@triton.jit
def _store_tile(dst, plane, row, col, tile, rows, cols, BR: tl.constexpr, BC: tl.constexpr, TMA: tl.constexpr):
    if TMA:
        dst.store([plane, row, col], downcast(tile, dst.dtype).reshape(1, BR, BC))
    else:
        r = row + tl.arange(0, BR)
        c = col + tl.arange(0, BC)
        offset = (tl.cast(plane, tl.int64) * rows + r[:, None]) * cols + c[None, :]
        tl.store(dst + offset, downcast(tile, dst.dtype.element_ty), mask=(r < rows)[:, None] & (c < cols)[None, :])


@triton.jit
def _load_tokens(src, pair, col, cols, TOP_K: tl.constexpr, BC: tl.constexpr):
    """The tokens of pairs `pair`: rows of `src` [T, cols], columns col .. col + BC; zero where the pair is -1."""
    c = col + tl.arange(0, BC)
    offset = (pair // TOP_K).to(tl.int64)[:, None] * cols + c[None, :]
    return tl.load(src + offset, mask=(pair >= 0)[:, None] & (c < cols)[None, :], other=0.0)


@triton.jit
def _tile_at(tile, row_tiles, col_tiles, GROUP: tl.constexpr):
    """Row and column of a tile, in groups of GROUP row tiles that share weights in the L2 cache."""
    group = tile // (GROUP * col_tiles)
    first = group * GROUP
    height = tl.minimum(row_tiles - first, GROUP)
    inside = tile - group * GROUP * col_tiles
    return first + inside % height, inside // height


@triton.jit
def _at_most(x, LIMIT: tl.constexpr):
    """min(x, LIMIT), or x without a LIMIT; NaN stays NaN."""
    if LIMIT is not None:
        x = tl.minimum(x, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    return x


@triton.jit
def _within(x, LIMIT: tl.constexpr):
    """clamp(x, -LIMIT, LIMIT), or x without a LIMIT; NaN stays NaN."""
    if LIMIT is not None:
        x = tl.clamp(x, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    return x


@triton.jit
def gate_up_kernel(
    x,
    row_to_pair,
    gate_up,
    up_weight,
    bias,
    projected,
    act,
    expert_offsets,
    tile_expert,
    experts,
    rows,
    hidden,
    intermediate,
    ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    UP_OFFSET: tl.constexpr,
    CLAMPS_ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BIASED: tl.constexpr,
    SPLIT: tl.constexpr,
    TOP_K: tl.constexpr,
    TMA: tl.constexpr,
    ALIGN: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    """projected = gate and up of x (plus bias), and act = (up + UP_OFFSET) * activation(gate), clamped.

    x: [T, H]. SPLIT: `gate_up` is gate_proj [E, I, H] and `up_weight` is up_proj [E, I, H].
    Not GATED: `gate_up` is the only weight [E, I, H], and act = activation(projected).
    """
    # Gate and up in one tile.
    JOINT: tl.constexpr = GATED and not SPLIT and (BIASED or not TRANSPOSED)
    row_tiles = tl.load(expert_offsets + experts) // BM
    col_tiles = tl.cdiv(intermediate, BN)
    for tile in tl.range(tl.program_id(0), row_tiles * col_tiles, tl.num_programs(0), flatten=FLATTEN):
        tm, tn = _tile_at(tile, row_tiles, col_tiles, GROUP)
        expert = tl.load(tile_expert + tm * BM // ALIGN)
        row = tm * BM
        col = tn * BN
        pair = tl.load(row_to_pair + row + tl.arange(0, BM))
        if JOINT:
            acc = tl.zeros((BM, 2 * BN), tl.float32)
        else:
            gate = tl.zeros((BM, BN), tl.float32)
            up = tl.zeros((BM, BN), tl.float32)
        for k in range(0, hidden, BK):
            a = _load_tokens(x, pair, k, hidden, TOP_K, BK)
            if SPLIT:
                b = _load_tile(gate_up, expert, col, k, intermediate, hidden, BN, BK, TMA).T
                c = _load_tile(up_weight, expert, col, k, intermediate, hidden, BN, BK, TMA).T
                gate = dot_of_block(a, b, gate)
                up = dot_of_block(a, c, up)
            elif not GATED:
                gate = dot_of_block(a, _load_tile(gate_up, expert, col, k, intermediate, hidden, BN, BK, TMA).T, gate)
            elif not JOINT:
                b = _load_tile(gate_up, expert, k, col, hidden, 2 * intermediate, BK, BN, TMA)
                c = _load_tile(gate_up, expert, k, intermediate + col, hidden, 2 * intermediate, BK, BN, TMA)
                gate = dot_of_block(a, b, gate)
                up = dot_of_block(a, c, up)
            else:
                if BIASED:
                    b = _load_tile(gate_up, expert, k, 2 * col, hidden, 2 * intermediate, BK, 2 * BN, TMA)
                else:
                    b = _load_pair(gate_up, 2 * expert, col, k, intermediate, hidden, BN, BK, TMA).T
                acc = dot_of_block(a, b, acc)
        if BIASED:
            acc += _load_bias(bias, expert, 2 * col, 2 * intermediate, 2 * BN)
            gate, up = tl.split(acc.reshape(BM, BN, 2))
        elif JOINT:
            gate, up = tl.split(acc.reshape(BM, 2, BN).permute(0, 2, 1))
        _store_tile(projected, 0, row, col, gate, rows, intermediate, BM, BN, TMA)
        if CLAMPS_ACTIVATION:
            h = _at_most(activation(gate, ACTIVATION, ALPHA), LIMIT)
        else:
            h = activation(_at_most(gate, LIMIT), ACTIVATION, ALPHA)
        if GATED:
            _store_tile(projected, 1, row, col, up, rows, intermediate, BM, BN, TMA)
            h *= _within(up, LIMIT) + UP_OFFSET
        _store_tile(act, 0, row, col, h, rows, intermediate, BM, BN, TMA)


@triton.jit
def _load_bias(bias, expert, col, columns, BN: tl.constexpr):
    """[1, BN] of `bias` [E, columns] in float32."""
    c = col + tl.arange(0, BN)
    offset = tl.cast(expert, tl.int64) * columns + c
    return tl.load(bias + offset, mask=c < columns, other=0.0).to(tl.float32)[None, :]


@triton.jit
def rows_kernel(
    a,
    weight,
    other,
    bias,
    out,
    expert_offsets,
    tile_expert,
    experts,
    rows,
    columns,
    inner,
    BIASED: tl.constexpr,
    SPLIT: tl.constexpr,
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
    """out [1, R, N] = sum over planes of a [PLANES, R, K] times weight [E * PLANES, N, K]^T or [E * PLANES, K, N].

    BIASED: plus bias [E, N]. SPLIT: `weight` is for plane 0 and `other` for plane 1, [E, N, K] or [E, K, N] each.
    """
    row_tiles = tl.load(expert_offsets + experts) // BM
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
            source = weight
            if SPLIT:
                # Select the pointer or descriptor instead of the tile: a load inside the branch would not be pipelined.
                if plane == 1:
                    source = other
                group = expert
            else:
                group = expert * PLANES + plane
            if WEIGHT_NK:
                right = _load_tile(source, group, col, k, columns, inner, BN, BK, TMA).T
            else:
                right = _load_tile(source, group, k, col, inner, columns, BK, BN, TMA)
            acc = dot_of_block(left, right, acc)
        if BIASED:
            acc += _load_bias(bias, expert, col, columns, BN)
        _store_tile(out, 0, row, col, acc, rows, columns, BM, BN, TMA)


@triton.jit
def gate_grad_kernel(
    act_grad,
    projected,
    row_grad,
    down_bias,
    row_to_pair,
    top_k_weights,
    projected_grad,
    weighted_act,
    weights_grad,
    expert_offsets,
    tile_expert,
    experts,
    rows,
    hidden,
    intermediate,
    ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    UP_OFFSET: tl.constexpr,
    CLAMPS_ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BIASED: tl.constexpr,
    ALIGN: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
):
    """Backward of the gating; `act_grad` [1, R, I] is the gradient of each row's act before the routing weight.

    Writes projected_grad [2, R, I] (TRANSPOSED: [1, R, 2I]; not GATED: [1, R, I]); weighted_act [1, R, I] =
    weight * act, for the gradient of down_proj; and, at each row's pair, the gradient of its routing weight:
    dot(act, act_grad), if BIASED plus dot(down_bias [E, H], row_grad [1, R, H]).
    """
    row = tl.program_id(0) * BM
    if row < tl.load(expert_offsets + experts):
        r = row + tl.arange(0, BM)
        pair = tl.load(row_to_pair + r)
        weight = tl.load(top_k_weights + pair, mask=pair >= 0, other=0.0).to(tl.float32)[:, None]
        dots = tl.zeros((BM,), tl.float32)
        for col in range(0, intermediate, BC):
            c = col + tl.arange(0, BC)
            offset = r.to(tl.int64)[:, None] * intermediate + c[None, :]
            other = offset + tl.cast(rows, tl.int64) * intermediate
            live = (c < intermediate)[None, :]
            given_gate = tl.load(projected + offset, mask=live, other=0.0).to(tl.float32)
            grad = tl.load(act_grad + offset, mask=live, other=0.0).to(tl.float32)
            if CLAMPS_ACTIVATION:
                limited, slope = activation_and_slope(given_gate, ACTIVATION, ALPHA)
                glu = _at_most(limited, LIMIT)
            else:
                limited = given_gate
                glu, slope = activation_and_slope(_at_most(given_gate, LIMIT), ACTIVATION, ALPHA)
            act = glu
            gate_grad = grad * weight * slope
            if GATED:
                given_up = tl.load(projected + other, mask=live, other=0.0).to(tl.float32)
                lifted = _within(given_up, LIMIT) + UP_OFFSET
                act = glu * lifted
                gate_grad *= lifted
                up_grad = grad * weight * glu
                if LIMIT is not None:
                    up_grad = tl.where(is_below_limit(tl.abs(given_up), LIMIT), up_grad, 0.0)
            dots += tl.sum(act * grad, 1)
            if LIMIT is not None:
                gate_grad = tl.where(is_below_limit(limited, LIMIT), gate_grad, 0.0)
            dtype: tl.constexpr = projected_grad.dtype.element_ty
            tl.store(weighted_act + offset, downcast(act * weight, dtype), mask=live)
            if BIASED:
                both = 2 * col + tl.arange(0, 2 * BC)
                interleaved = tl.interleave(downcast(gate_grad, dtype), downcast(up_grad, dtype))
                at = r.to(tl.int64)[:, None] * (2 * intermediate) + both[None, :]
                tl.store(projected_grad + at, interleaved, mask=(both < 2 * intermediate)[None, :])
            elif TRANSPOSED:
                at = r.to(tl.int64)[:, None] * (2 * intermediate) + c[None, :]
                tl.store(projected_grad + at, downcast(gate_grad, dtype), mask=live)
                tl.store(projected_grad + at + intermediate, downcast(up_grad, dtype), mask=live)
            else:
                tl.store(projected_grad + offset, downcast(gate_grad, dtype), mask=live)
                if GATED:
                    tl.store(projected_grad + other, downcast(up_grad, dtype), mask=live)
        if BIASED:
            expert = tl.load(tile_expert + row // ALIGN)
            for col in range(0, hidden, BC):
                c = col + tl.arange(0, BC)
                at = r.to(tl.int64)[:, None] * hidden + c[None, :]
                grad = tl.load(row_grad + at, mask=(c < hidden)[None, :], other=0.0).to(tl.float32)
                dots += tl.sum(grad * _load_bias(down_bias, expert, col, hidden, BC), 1)
        tl.store(weights_grad + pair, downcast(dots, weights_grad.dtype.element_ty), mask=pair >= 0)


@triton.jit
def bias_grad_kernel(
    grad,
    row_to_pair,
    top_k_weights,
    out,
    expert_offsets,
    expert_counts,
    columns,
    WEIGHTED: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
):
    """out [E, C] = the sum of grad [1, R, C] over each expert's rows, times their routing weights if WEIGHTED."""
    expert = tl.program_id(0)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    start = tl.load(expert_offsets + expert)
    count = tl.load(expert_counts + expert)
    acc = tl.zeros((BM, BC), tl.float32)
    for first in range(0, count, BM):
        i = first + tl.arange(0, BM)
        r = start + i
        at = r.to(tl.int64)[:, None] * columns + c[None, :]
        term = tl.load(grad + at, mask=(i < count)[:, None] & (c < columns)[None, :], other=0.0).to(tl.float32)
        if WEIGHTED:
            pair = tl.load(row_to_pair + r, mask=i < count, other=-1)
            term *= tl.load(top_k_weights + pair, mask=pair >= 0, other=0.0).to(tl.float32)[:, None]
        acc += term
    total = tl.sum(acc, 0)
    offset = tl.cast(expert, tl.int64) * columns + c
    tl.store(out + offset, downcast(total, out.dtype.element_ty), mask=c < columns)


@triton.jit
def weight_grad_kernel(
    left,
    right,
    out,
    expert_offsets,
    expert_counts,
    groups,
    rows,
    left_columns,
    right_columns,
    PLANES: tl.constexpr,
    TMA: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    """out [E * PLANES, M, N] = left^T right over each expert's rows; left [PLANES, R, M], right [1, R, N]."""
    row_tiles = tl.cdiv(left_columns, BM)
    col_tiles = tl.cdiv(right_columns, BN)
    each = row_tiles * col_tiles
    for tile in tl.range(tl.program_id(0), groups * each, tl.num_programs(0), flatten=FLATTEN):
        group = tile // each
        expert = group // PLANES
        tm, tn = _tile_at(tile - group * each, row_tiles, col_tiles, GROUP)
        start = tl.load(expert_offsets + expert)
        count = tl.load(expert_counts + expert)
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(0, count, BK):
            row = start + k
            a = _load_tile(left, group - expert * PLANES, row, tm * BM, rows, left_columns, BK, BM, TMA)
            b = _load_tile(right, 0, row, tn * BN, rows, right_columns, BK, BN, TMA)
            acc = dot_of_block(a.T, b, acc)
        _store_tile(out, group, tm * BM, tn * BN, acc, left_columns, right_columns, BM, BN, TMA)


@triton.jit
def gather_kernel(
    x, row_to_pair, out, expert_offsets, experts, hidden, TOP_K: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr
):
    """out [R, H] = the token of each row; zero for padding."""
    row = tl.program_id(0) * BM
    if row < tl.load(expert_offsets + experts):
        r = row + tl.arange(0, BM)
        c = tl.program_id(1) * BC + tl.arange(0, BC)
        tile = _load_tokens(x, tl.load(row_to_pair + r), tl.program_id(1) * BC, hidden, TOP_K, BC)
        tl.store(out + r.to(tl.int64)[:, None] * hidden + c[None, :], tile, mask=(c < hidden)[None, :])


@triton.jit
def combine_kernel(
    rows, pair_to_row, top_k_weights, out, hidden, TOP_K: tl.constexpr, WEIGHTED: tl.constexpr, BC: tl.constexpr
):
    """out [T, H] = the sum of (weight *) the row of each pair of a token, in order; a pair without a row adds zero."""
    token = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    acc = tl.zeros((BC,), tl.float32)
    for choice in tl.static_range(TOP_K):
        row = tl.load(pair_to_row + token * TOP_K + choice)
        live = c < tl.where(row >= 0, hidden, 0)
        term = tl.load(rows + row.to(tl.int64) * hidden + c, mask=live, other=0.0).to(tl.float32)
        if WEIGHTED:
            term *= tl.load(top_k_weights + token * TOP_K + choice).to(tl.float32)
        acc += tl.where(live, term, 0.0)
    tl.store(out + token * hidden + c, downcast(acc, out.dtype.element_ty), mask=c < hidden)


@triton.jit
def pair_sum_kernel(parts, pair_to_row, out, pairs, rows, tiles, BLOCK: tl.constexpr):
    """out [P] = the sum over dim 0 of `parts` [tiles, R] at each pair's row; zero for a pair without a row."""
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(pair_to_row + pair, mask=pair < pairs, other=-1)
    acc = tl.zeros((BLOCK,), tl.float32)
    for tile in range(tiles):
        acc += tl.load(parts + tl.cast(tile, tl.int64) * rows + row, mask=row >= 0, other=0.0)
    tl.store(out + pair, downcast(acc, out.dtype.element_ty), mask=pair < pairs)
