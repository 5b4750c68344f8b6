"""Collapse of streams: projection, coefficients of each token, weighted sum, and their gradients.

Rows are tokens; x [rows, N, D] are the streams, contiguous. `raw` [rows, M] is fn x before the norm; its factor `rstd`
[rows] is applied afterwards: (fn x) rstd = fn (x rstd). Backward computes the coefficients again from the two.
"""

import triton
import triton.language as tl

from opslot.ops._common.kernels.tiles import dot_fp32


@triton.jit(do_not_specialize=["rows"])
def project_kernel(
    x_ptr,
    fn_ptr,
    raw_ptr,
    rstd_ptr,
    rows,
    norm_eps,
    WIDTH: tl.constexpr,
    M: tl.constexpr,
    M_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """raw and rstd of ROWS tokens; WIDTH is N D."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    m = tl.arange(0, M_BLOCK)
    x_row = x_ptr + row.to(tl.int64)[:, None] * WIDTH
    raw = tl.zeros((ROWS, M_BLOCK), tl.float32)
    squares = tl.zeros((ROWS,), tl.float32)
    for start in range(0, WIDTH, COLUMNS):
        k = start + column
        x = tl.load(x_row + k[None, :], mask=(row < rows)[:, None] & (k < WIDTH)[None, :], other=0.0).to(tl.float32)
        fn = tl.load(fn_ptr + m[None, :] * WIDTH + k[:, None], mask=(m < M)[None, :] & (k < WIDTH)[:, None], other=0.0)
        raw = dot_fp32(x, fn, raw)
        squares += tl.sum(x * x, 1)
    tl.store(raw_ptr + row[:, None] * M + m[None, :], raw, mask=(row < rows)[:, None] & (m < M)[None, :])
    tl.store(rstd_ptr + row, 1.0 / tl.sqrt_rn(squares / WIDTH + norm_eps), mask=row < rows)


@triton.jit
def _sigmoid(x):
    return tl.div_rn(1.0, 1.0 + tl.exp(-x))


@triton.jit
def _logits(
    raw_ptr,
    rstd,
    base_ptr,
    scale_ptr,
    row,
    rows,
    FIRST: tl.constexpr,
    PART: tl.constexpr,
    N: tl.constexpr,
    M: tl.constexpr,
):
    """scale * mixes + base of N coefficients of each token, and the mixes."""
    n = tl.arange(0, N)
    raw = tl.load(raw_ptr + row[:, None] * M + FIRST + n[None, :], mask=(row < rows)[:, None], other=0.0)
    mixes = raw * rstd[:, None]
    return mixes * tl.load(scale_ptr + PART) + tl.load(base_ptr + FIRST + n)[None, :], mixes


@triton.jit
def _square(N: tl.constexpr):
    """Offsets in a matrix [N, N] of a token."""
    n = tl.arange(0, N)
    return (n[:, None] * N + n[None, :])[None, :, :]


@triton.jit
def _softmax(logits):
    e = tl.exp(logits - tl.max(logits, 2)[:, :, None])
    return tl.div_rn(e, tl.broadcast_to(tl.sum(e, 2)[:, :, None], e.shape))


@triton.jit
def _normalize(x, eps, AXIS: tl.constexpr):
    """x divided by its sums over an axis, and the divisors."""
    divisors = tl.sum(x, AXIS) + eps
    return tl.div_rn(x, tl.broadcast_to(tl.expand_dims(divisors, AXIS), x.shape)), divisors


@triton.jit
def _undo_normalize(gradient, x, divisors, AXIS: tl.constexpr):
    """The gradient of what `_normalize` made x of, and that itself."""
    divisors = tl.broadcast_to(tl.expand_dims(divisors, AXIS), x.shape)
    sums = tl.broadcast_to(tl.expand_dims(tl.sum(gradient * x, AXIS), AXIS), x.shape)
    return (gradient - sums) / divisors, x * divisors


@triton.jit(do_not_specialize=["rows", "iterations"])
def coefficients_kernel(
    raw_ptr,
    rstd_ptr,
    base_ptr,
    scale_ptr,
    pre_ptr,
    post_ptr,
    comb_ptr,
    rows,
    iterations,
    eps,
    post_eps,
    magnitude,
    N: tl.constexpr,
    M: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """pre, post (from 2 PARTS on) and comb (3 PARTS) of ROWS tokens."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    n = tl.arange(0, N)
    vectors = row[:, None] * N + n[None, :]
    rstd = tl.load(rstd_ptr + row, mask=inside, other=0.0)
    logits, _ = _logits(raw_ptr, rstd, base_ptr, scale_ptr, row, rows, 0, 0, N, M)
    tl.store(pre_ptr + vectors, _sigmoid(logits) + eps, mask=inside[:, None])
    if PARTS > 1:
        logits, _ = _logits(raw_ptr, rstd, base_ptr, scale_ptr, row, rows, N, 1, N, M)
        tl.store(post_ptr + vectors, magnitude * _sigmoid(logits) + post_eps, mask=inside[:, None])
    if PARTS > 2:
        square = _square(N)
        raw = tl.load(raw_ptr + row[:, None, None] * M + 2 * N + square, mask=inside[:, None, None], other=0.0)
        logits = raw * rstd[:, None, None] * tl.load(scale_ptr + 2) + tl.load(base_ptr + 2 * N + square)
        comb, _ = _normalize(_softmax(logits) + eps, eps, 1)
        for _ in range(iterations - 1):
            comb, _ = _normalize(comb, eps, 2)
            comb, _ = _normalize(comb, eps, 1)
        tl.store(comb_ptr + row[:, None, None] * (N * N) + square, comb, mask=inside[:, None, None])


@triton.jit
def weighted_sum_kernel(x_ptr, pre_ptr, out_ptr, D: tl.constexpr, N: tl.constexpr, COLUMNS: tl.constexpr):
    """The streams of a token, times pre and summed: COLUMNS of its D elements."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    n = tl.arange(0, N)
    x = tl.load(x_ptr + row * (N * D) + n[:, None] * D + d[None, :], mask=(d < D)[None, :], other=0.0)
    pre = tl.load(pre_ptr + row * N + n)
    tl.store(out_ptr + row * D + d, tl.sum(x.to(tl.float32) * pre[:, None], 0), mask=d < D)


@triton.jit
def pre_gradient_kernel(x_ptr, dout_ptr, dpre_ptr, D: tl.constexpr, N: tl.constexpr, COLUMNS: tl.constexpr):
    """The gradient of pre of a token: its streams times the gradient of the collapsed one."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, N)
    products = tl.zeros((N, COLUMNS), tl.float32)
    for start in range(0, D, COLUMNS):
        d = start + tl.arange(0, COLUMNS)
        x = tl.load(x_ptr + row * (N * D) + n[:, None] * D + d[None, :], mask=(d < D)[None, :], other=0.0)
        dout = tl.load(dout_ptr + row * D + d, mask=d < D, other=0.0)
        products += x.to(tl.float32) * dout.to(tl.float32)[None, :]
    tl.store(dpre_ptr + row * N + n, tl.sum(products, 1))


@triton.jit
def _store_logit_gradients(
    dlogits, mixes, part, first, raw_offsets, mask, dlogits_ptr, dscaled_ptr, draw_ptr, scale_ptr, rstd
):
    """Writes what base, scale and fn need of the gradient of logits; returns the gradient of the mixes."""
    dmixes = dlogits * tl.load(scale_ptr + part)
    tl.store(dlogits_ptr + raw_offsets + first, dlogits, mask=mask)
    tl.store(dscaled_ptr + raw_offsets + first, dlogits * mixes, mask=mask)
    tl.store(draw_ptr + raw_offsets + first, dmixes * rstd, mask=mask)
    return dmixes * mixes


@triton.jit(do_not_specialize=["rows", "iterations"])
def coefficients_gradient_kernel(
    raw_ptr,
    rstd_ptr,
    base_ptr,
    scale_ptr,
    dpre_ptr,
    dpost_ptr,
    dcomb_ptr,
    divisors_ptr,
    dlogits_ptr,
    dscaled_ptr,
    draw_ptr,
    dx_factor_ptr,
    rows,
    iterations,
    eps,
    magnitude,
    WIDTH: tl.constexpr,
    N: tl.constexpr,
    M: tl.constexpr,
    PARTS: tl.constexpr,
    GIVEN_POST: tl.constexpr,
    GIVEN_COMB: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The gradients of logits, of `raw`, and the factor of x in its gradient through the norm, of ROWS tokens.

    divisors [2 * iterations, rows, N] is scratch memory: the sums by which Sinkhorn's iterations divide.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    n = tl.arange(0, N)
    vectors = row[:, None] * N + n[None, :]
    mask = inside[:, None]
    raw_rows = row[:, None] * M + n[None, :]
    rstd = tl.load(rstd_ptr + row, mask=inside, other=0.0)

    logits, mixes = _logits(raw_ptr, rstd, base_ptr, scale_ptr, row, rows, 0, 0, N, M)
    s = _sigmoid(logits)
    dlogits = tl.load(dpre_ptr + vectors, mask=mask, other=0.0) * s * (1.0 - s)
    norm = tl.sum(
        _store_logit_gradients(
            dlogits, mixes, 0, 0, raw_rows, mask, dlogits_ptr, dscaled_ptr, draw_ptr, scale_ptr, rstd[:, None]
        ),
        1,
    )
    if PARTS > 1:
        logits, mixes = _logits(raw_ptr, rstd, base_ptr, scale_ptr, row, rows, N, 1, N, M)
        s = _sigmoid(logits)
        dlogits = tl.zeros((ROWS, N), tl.float32)
        if GIVEN_POST:
            dlogits = magnitude * tl.load(dpost_ptr + vectors, mask=mask, other=0.0) * s * (1.0 - s)
        norm += tl.sum(
            _store_logit_gradients(
                dlogits, mixes, 1, N, raw_rows, mask, dlogits_ptr, dscaled_ptr, draw_ptr, scale_ptr, rstd[:, None]
            ),
            1,
        )
    if PARTS > 2:
        square = _square(N)
        mask3 = inside[:, None, None]
        raw = tl.load(raw_ptr + row[:, None, None] * M + 2 * N + square, mask=mask3, other=0.0)
        mixes = raw * rstd[:, None, None]
        probabilities = _softmax(mixes * tl.load(scale_ptr + 2) + tl.load(base_ptr + 2 * N + square))
        dlogits = tl.zeros((ROWS, N, N), tl.float32)
        if GIVEN_COMB:
            plane = rows.to(tl.int64) * N
            comb, divisors = _normalize(probabilities + eps, eps, 1)
            tl.store(divisors_ptr + vectors, divisors, mask=mask)
            for i in range(1, iterations):
                comb, divisors = _normalize(comb, eps, 2)
                tl.store(divisors_ptr + (2 * i - 1) * plane + vectors, divisors, mask=mask)
                comb, divisors = _normalize(comb, eps, 1)
                tl.store(divisors_ptr + 2 * i * plane + vectors, divisors, mask=mask)
            # Other threads may load what a thread has stored.
            tl.debug_barrier()
            gradient = tl.load(dcomb_ptr + row[:, None, None] * (N * N) + square, mask=mask3, other=0.0)
            for i in range(1, iterations):
                step = iterations - i
                of_columns = tl.load(divisors_ptr + 2 * step * plane + vectors, mask=mask, other=1.0)
                gradient, comb = _undo_normalize(gradient, comb, of_columns, 1)
                of_rows = tl.load(divisors_ptr + (2 * step - 1) * plane + vectors, mask=mask, other=1.0)
                gradient, comb = _undo_normalize(gradient, comb, of_rows, 2)
            of_columns = tl.load(divisors_ptr + vectors, mask=mask, other=1.0)
            gradient, comb = _undo_normalize(gradient, comb, of_columns, 1)
            dlogits = probabilities * (gradient - tl.sum(gradient * probabilities, 2)[:, :, None])
        products = _store_logit_gradients(
            dlogits,
            mixes,
            2,
            2 * N,
            row[:, None, None] * M + square,
            mask3,
            dlogits_ptr,
            dscaled_ptr,
            draw_ptr,
            scale_ptr,
            rstd[:, None, None],
        )
        norm += tl.sum(tl.sum(products, 2), 1)
    # mixes = raw rstd, and rstd = (mean of x^2 + eps)^-1/2.
    tl.store(dx_factor_ptr + row, -norm * rstd * rstd / WIDTH, mask=inside)


@triton.jit(do_not_specialize=["rows", "rows_per_program"])
def streams_gradient_kernel(
    x_ptr,
    fn_ptr,
    pre_ptr,
    dout_ptr,
    draw_ptr,
    dx_factor_ptr,
    dx_ptr,
    dfn_ptr,
    rows,
    rows_per_program,
    D: tl.constexpr,
    N: tl.constexpr,
    M: tl.constexpr,
    M_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GIVEN_OUT: tl.constexpr,
    NEED_X: tl.constexpr,
    NEED_FN: tl.constexpr,
):
    """COLUMNS of one stream: the gradient of x, and the sum over the program's tokens for fn, in a plane of dfn."""
    blocks: tl.constexpr = (D + COLUMNS - 1) // COLUMNS
    stream = tl.program_id(0) // blocks
    d = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    column = stream * D + d
    m = tl.arange(0, M_BLOCK)
    fn_mask = (m < M)[:, None] & (d < D)[None, :]
    fn_offsets = m[:, None] * (N * D) + column[None, :]
    if NEED_X:
        fn = tl.load(fn_ptr + fn_offsets, mask=fn_mask, other=0.0)
    dfn = tl.zeros((M_BLOCK, COLUMNS), tl.float32)
    first = tl.program_id(1) * rows_per_program
    last = tl.minimum(first + rows_per_program, rows)
    for start in range(first, last, ROWS):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)
        mask = (row < last)[:, None] & (d < D)[None, :]
        x = tl.load(x_ptr + row[:, None] * (N * D) + column[None, :], mask=mask, other=0.0).to(tl.float32)
        if NEED_FN:
            # Loaded transposed; see the note in tiles.py.
            draw_t = tl.load(
                draw_ptr + row[None, :] * M + m[:, None], mask=(row < last)[None, :] & (m < M)[:, None], other=0.0
            )
            dfn = dot_fp32(draw_t, x, dfn)
        if NEED_X:
            draw = tl.load(
                draw_ptr + row[:, None] * M + m[None, :], mask=(row < last)[:, None] & (m < M)[None, :], other=0.0
            )
            dx = x * tl.load(dx_factor_ptr + row, mask=row < last, other=0.0)[:, None]
            if GIVEN_OUT:
                dout = tl.load(dout_ptr + row[:, None] * D + d[None, :], mask=mask, other=0.0)
                pre = tl.load(pre_ptr + row * N + stream, mask=row < last, other=0.0)
                dx += dout.to(tl.float32) * pre[:, None]
            dx = dot_fp32(draw, fn, dx)
            tl.store(dx_ptr + row[:, None] * (N * D) + column[None, :], dx, mask=mask)
    if NEED_FN:
        plane = tl.program_id(1).to(tl.int64) * (M * N * D)
        tl.store(dfn_ptr + plane + fn_offsets, dfn, mask=fn_mask)
