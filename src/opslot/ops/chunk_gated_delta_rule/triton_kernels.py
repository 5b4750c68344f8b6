"""Triton kernels of chunk_gated_delta_rule: the chunked recurrence and its adjoint.

Per chunk of 64 tokens and value head, with G the cumulated log decay of the chunk's tokens, L_ij = exp(G_i - G_j) for
i >= j, b the writing rates and S [K, V] the state that arrives (Yang et al. 2024, section 3.3; the triangular system is
the WY form of arXiv 2406.06484):

    A_ij = b_i (k_i . k_j) L_ij below the diagonal,  M = (I + A)^-1
    reads = M (b exp(G) k),  writes = M (b v),  correction d = writes - reads S
    S' = exp(G_last) S + (exp(G_last - G) k)^T d,  out = scale (exp(G) q S + (tril(q k^T) L) d)

Backward, from dout and the gradient dS' of the state that leaves; x is the gradient of the system's right side
b (v - exp(G) k S):

    P = scale tril(q k^T) L,  dd = P^T dout + exp(G_last - G) k dS',  x = M^T dd
    dS = exp(G_last) dS' + scale (exp(G) q)^T dout - reads^T dd
    dP = tril(dout d^T),  dA = -strictly_lower(x d^T)

and the rule for products gives the rest. Wherever G_i occurs it scales a row of q, k or S, so that its gradient is made
of row dots of q with dq and of k with the parts of dk. No exponent is positive, since no log decay is.

No operand of a product is the transpose of a computed tile: what is needed transposed is computed that way, or goes
through memory. From such operands Triton 3.4 and later compute wrong products on Hopper (flash-linear-attention issues
640 and 984).

Layouts: tokens [T, heads, width] with strides, T over all rows; what only kernels see lies by chunk,
[chunks * V_heads, 64, width], zero (reads, writes and what follows from them) behind a chunk's last token. The table of
chunks may hold chunks of length 0 at its end; nothing is read or written for those.
"""

from __future__ import annotations

import triton
import triton.language as tl

from opslot.ops._common.jit import dot, narrow

# A width is a few blocks long: with more loads in flight, shared memory would hold fewer programs.
_STAGES = tl.constexpr(2)


@triton.jit
def _tokens(ptr, start, length, head, token_stride, head_stride, column, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    """[CHUNK, columns] of one head from token `start` on; zero behind `length` tokens and WIDTH columns."""
    i = tl.arange(0, CHUNK)
    offset = (start + i).to(tl.int64)[:, None] * token_stride + head * head_stride + column[None, :]
    return tl.load(ptr + offset, mask=(i < length)[:, None] & (column < WIDTH)[None, :], other=0.0)


@triton.jit
def _store_tokens(
    ptr, tile, start, length, head, column, HEADS: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr
):
    """Columns of one head into contiguous tokens [T, HEADS, WIDTH]."""
    i = tl.arange(0, CHUNK)
    offset = ((start + i).to(tl.int64)[:, None] * HEADS + head) * WIDTH + column[None, :]
    mask = (i < length)[:, None] & (column < WIDTH)[None, :]
    tl.store(ptr + offset, narrow(tile, ptr.dtype.element_ty), mask=mask)


@triton.jit
def _plane(ptr, index, column, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """[ROWS, columns] of plane `index` of [planes, ROWS, WIDTH]."""
    offset = (index.to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None] * WIDTH + column[None, :]
    return tl.load(ptr + offset, mask=(column < WIDTH)[None, :], other=0.0)


@triton.jit
def _store_plane(ptr, tile, index, column, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    offset = (index.to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None] * WIDTH + column[None, :]
    tl.store(ptr + offset, narrow(tile, ptr.dtype.element_ty), mask=(column < WIDTH)[None, :])


@triton.jit
def _state(ptr, index, row, column, K: tl.constexpr, V: tl.constexpr):
    """Rows and columns of state `index` of [states, K, V]."""
    offset = (index.to(tl.int64) * K + row)[:, None] * V + column[None, :]
    return tl.load(ptr + offset, mask=(row < K)[:, None] & (column < V)[None, :], other=0.0)


@triton.jit
def _store_state(ptr, tile, index, row, column, K: tl.constexpr, V: tl.constexpr):
    offset = (index.to(tl.int64) * K + row)[:, None] * V + column[None, :]
    mask = (row < K)[:, None] & (column < V)[None, :]
    tl.store(ptr + offset, narrow(tile, ptr.dtype.element_ty), mask=mask)


@triton.jit
def _scalars(ptr, start, length, head, HEADS: tl.constexpr, ROWS: tl.constexpr):
    """float32 [ROWS] of one head of [T, HEADS]; zero behind `length` tokens."""
    i = tl.arange(0, ROWS)
    offset = (start + i).to(tl.int64) * HEADS + head
    return tl.load(ptr + offset, mask=i < length, other=0.0).to(tl.float32)


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


@triton.jit(do_not_specialize=["rows"])
def normalize_kernel(
    x_ptr,
    out_ptr,
    token_stride,
    head_stride,
    rows,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each row of [T, HEADS, WIDTH] divided by its norm."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (column < WIDTH)[None, :]
    offset = (row // HEADS).to(tl.int64) * token_stride + (row % HEADS) * head_stride
    x = tl.load(x_ptr + offset[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
    x *= tl.rsqrt(tl.sum(x * x, 1) + 1e-6)[:, None]
    tl.store(out_ptr + row.to(tl.int64)[:, None] * WIDTH + column[None, :], narrow(x, out_ptr.dtype.element_ty), mask)


@triton.jit
def _unit_inverses(b0, b1, b2, b3, SIZE: tl.constexpr):
    """(I + b)^-1 of four strictly lower [SIZE, SIZE] blocks, by forward substitution."""
    i = tl.arange(0, SIZE)
    below = tl.join(tl.join(b0, b1), tl.join(b2, b3))
    rows = i[:, None, None, None]
    columns = i[None, :, None, None]
    inverse = tl.where(rows == columns, 1.0, tl.zeros_like(below))
    for j in range(SIZE - 1):
        column = tl.sum(tl.where(columns == j, below, 0.0), 1, keep_dims=True)
        row = tl.sum(tl.where(rows == j, inverse, 0.0), 0, keep_dims=True)
        inverse -= column * row
    first, second = tl.split(inverse)
    i0, i1 = tl.split(first)
    i2, i3 = tl.split(second)
    return i0, i1, i2, i3


@triton.jit
def solve_kernel(
    k_ptr,
    g_ptr,
    beta_ptr,
    start_ptr,
    length_ptr,
    cumulated_ptr,
    inverse_ptr,
    k_token,
    k_head,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """G [chunks * V_heads, CHUNK] and M [chunks * V_heads, CHUNK, CHUNK], in four by four blocks."""
    BLOCK: tl.constexpr = CHUNK // 4
    program = tl.program_id(0)
    start = tl.load(start_ptr + program // HEADS)
    length = tl.load(length_ptr + program // HEADS)
    if length > 0:
        head = program % HEADS
        i = tl.arange(0, BLOCK)
        cumulated = ()
        passed = tl.sum(tl.zeros((BLOCK,), dtype=tl.float32))
        for r in tl.static_range(4):
            g = _scalars(g_ptr, start + r * BLOCK, length - r * BLOCK, head, HEADS, BLOCK)
            total = passed + tl.cumsum(g, 0)
            passed += tl.sum(g)
            tl.store(cumulated_ptr + program.to(tl.int64) * CHUNK + r * BLOCK + i, total)
            cumulated = cumulated + (total,)  # noqa: RUF005
        # Blocks of the lower triangle, row after row: (r, c) at r (r + 1) / 2 + c.
        zeros = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
        products = (zeros,) * 10
        for first in tl.static_range(0, K, BK):
            column = first + tl.arange(0, BK)
            keys = ()
            for r in tl.static_range(4):
                k = _tokens(
                    k_ptr, start + r * BLOCK, length - r * BLOCK, head // GROUP, k_token, k_head, column, K, BLOCK
                )
                keys = keys + (k,)  # noqa: RUF005
            added = ()
            for r in tl.static_range(4):
                for c in tl.static_range(r + 1):
                    added = added + (dot(keys[r], tl.trans(keys[c]), products[r * (r + 1) // 2 + c]),)  # noqa: RUF005
            products = added
        below = ()
        for r in tl.static_range(4):
            rate = _scalars(beta_ptr, start + r * BLOCK, length - r * BLOCK, head, HEADS, BLOCK)
            for c in tl.static_range(r + 1):
                between = cumulated[r][:, None] - cumulated[c][None, :]
                if r == c:
                    between = tl.where(i[:, None] > i[None, :], between, float("-inf"))
                block = rate[:, None] * products[r * (r + 1) // 2 + c] * tl.exp(between)
                below = below + (block,)  # noqa: RUF005
        own = _unit_inverses(below[0], below[2], below[5], below[9], BLOCK)
        solved = ()
        for r in tl.static_range(4):
            for c in tl.static_range(r):
                known = zeros
                for s in tl.static_range(c, r):
                    known = dot(below[r * (r + 1) // 2 + s], solved[s * (s + 1) // 2 + c], known)
                solved = solved + (dot(-own[r], known, zeros),)  # noqa: RUF005
            solved = solved + (own[r],)  # noqa: RUF005
        base = inverse_ptr + program.to(tl.int64) * CHUNK * CHUNK + i[:, None] * CHUNK + i[None, :]
        for r in tl.static_range(4):
            for c in tl.static_range(4):
                block = zeros
                if c <= r:
                    block = solved[r * (r + 1) // 2 + c]
                tl.store(base + r * BLOCK * CHUNK + c * BLOCK, narrow(block, inverse_ptr.dtype.element_ty))


@triton.jit
def reads_writes_kernel(
    k_ptr,
    v_ptr,
    beta_ptr,
    start_ptr,
    length_ptr,
    cumulated_ptr,
    inverse_ptr,
    reads_ptr,
    writes_ptr,
    k_token,
    k_head,
    v_token,
    v_head,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """reads [chunks * V_heads, CHUNK, K] and writes [chunks * V_heads, CHUNK, V]."""
    program = tl.program_id(0)
    start = tl.load(start_ptr + program // HEADS)
    length = tl.load(length_ptr + program // HEADS)
    if length > 0:
        head = program % HEADS
        dtype: tl.constexpr = k_ptr.dtype.element_ty
        i = tl.arange(0, CHUNK)
        rate = _scalars(beta_ptr, start, length, head, HEADS, CHUNK)
        cumulated = tl.load(cumulated_ptr + program.to(tl.int64) * CHUNK + i)
        inverse = _plane(inverse_ptr, program, i, CHUNK, CHUNK).to(tl.float32)
        # The rates scale columns of M instead of rows of k and v, which enter as they are.
        of_v = narrow(inverse * rate[None, :], dtype)
        of_k = narrow(inverse * (rate * tl.exp(cumulated))[None, :], dtype)
        for first in tl.range(0, V, BV, num_stages=_STAGES):
            column = first + tl.arange(0, BV)
            v = _tokens(v_ptr, start, length, head, v_token, v_head, column, V, CHUNK)
            writes = dot(of_v, v, tl.zeros((CHUNK, BV), dtype=tl.float32))
            _store_plane(writes_ptr, writes, program, column, V, CHUNK)
        for first in tl.range(0, K, BK, num_stages=_STAGES):
            column = first + tl.arange(0, BK)
            k = _tokens(k_ptr, start, length, head // GROUP, k_token, k_head, column, K, CHUNK)
            reads = dot(of_k, k, tl.zeros((CHUNK, BK), dtype=tl.float32))
            _store_plane(reads_ptr, reads, program, column, K, CHUNK)


@triton.jit
def states_kernel(
    k_ptr,
    reads_ptr,
    writes_ptr,
    cumulated_ptr,
    cu_seqlens_ptr,
    first_chunk_ptr,
    initial_ptr,
    states_ptr,
    correction_ptr,
    final_ptr,
    k_token,
    k_head,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    WANT_FINAL: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A document's chunks one after the other: the state that each finds, its correction, and the last state."""
    document = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    dtype: tl.constexpr = k_ptr.dtype.element_ty
    row = tl.arange(0, BK)
    column = tl.program_id(1) * BV + tl.arange(0, BV)
    i = tl.arange(0, CHUNK)
    begin = tl.load(cu_seqlens_ptr + document).to(tl.int32)
    end = tl.load(cu_seqlens_ptr + document + 1).to(tl.int32)
    first = tl.load(first_chunk_ptr + document)
    count = tl.load(first_chunk_ptr + document + 1) - first
    state = tl.zeros((BK, BV), dtype=tl.float32)
    if HAS_INITIAL:
        state += _state(initial_ptr, tl.program_id(0), row, column, K, V).to(tl.float32)
    for step in tl.range(0, count, num_stages=STAGES):
        start = begin + step * CHUNK
        index = (first + step) * HEADS + head
        held = narrow(state, dtype)
        _store_state(states_ptr, state, index, row, column, K, V)
        k = _tokens(k_ptr, start, end - start, head // GROUP, k_token, k_head, row, K, CHUNK)
        reads = _plane(reads_ptr, index, row, K, CHUNK)
        writes = _plane(writes_ptr, index, column, V, CHUNK).to(tl.float32)
        cumulated = tl.load(cumulated_ptr + index.to(tl.int64) * CHUNK + i)
        last = tl.load(cumulated_ptr + index.to(tl.int64) * CHUNK + CHUNK - 1)
        correction = writes - dot(reads, held, tl.zeros((CHUNK, BV), dtype=tl.float32))
        _store_plane(correction_ptr, correction, index, column, V, CHUNK)
        kept = narrow(correction * tl.exp(last - cumulated)[:, None], dtype)
        state = dot(tl.trans(k), kept, state * tl.exp(last))
    if WANT_FINAL:
        _store_state(final_ptr, state, tl.program_id(0), row, column, K, V)


@triton.jit
def _decay(row_cumulated, column_cumulated, kept):
    """exp(rows - columns) where `kept`, else 0."""
    return tl.exp(tl.where(kept, row_cumulated[:, None] - column_cumulated[None, :], float("-inf")))


@triton.jit
def output_kernel(
    q_ptr,
    k_ptr,
    start_ptr,
    length_ptr,
    cumulated_ptr,
    states_ptr,
    correction_ptr,
    out_ptr,
    q_token,
    q_head,
    k_token,
    k_head,
    scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """out [T, V_heads, V]."""
    program = tl.program_id(0)
    start = tl.load(start_ptr + program // HEADS)
    length = tl.load(length_ptr + program // HEADS)
    if length > 0:
        head = program % HEADS
        column = tl.program_id(1) * BV + tl.arange(0, BV)
        i = tl.arange(0, CHUNK)
        cumulated = tl.load(cumulated_ptr + program.to(tl.int64) * CHUNK + i)
        within = tl.zeros((CHUNK, CHUNK), dtype=tl.float32)
        out = tl.zeros((CHUNK, BV), dtype=tl.float32)
        for first in tl.range(0, K, BK, num_stages=_STAGES):
            row = first + tl.arange(0, BK)
            q = _tokens(q_ptr, start, length, head // GROUP, q_token, q_head, row, K, CHUNK)
            k = _tokens(k_ptr, start, length, head // GROUP, k_token, k_head, row, K, CHUNK)
            state = _state(states_ptr, program, row, column, K, V)
            within = dot(q, tl.trans(k), within)
            out = dot(q, state, out)
        within *= _decay(cumulated, cumulated, i[:, None] >= i[None, :])
        correction = _plane(correction_ptr, program, column, V, CHUNK)
        out = dot(narrow(within, q_ptr.dtype.element_ty), correction, out * tl.exp(cumulated)[:, None])
        _store_tokens(out_ptr, out * scale, start, length, head, column, HEADS, V, CHUNK)


@triton.jit
def local_kernel(
    q_ptr,
    k_ptr,
    dout_ptr,
    start_ptr,
    length_ptr,
    cumulated_ptr,
    local_ptr,
    q_token,
    q_head,
    k_token,
    k_head,
    dout_token,
    dout_head,
    scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """P^T dout [chunks * V_heads, CHUNK, V]: what a correction's own chunk asks of it."""
    program = tl.program_id(0)
    start = tl.load(start_ptr + program // HEADS)
    length = tl.load(length_ptr + program // HEADS)
    if length > 0:
        head = program % HEADS
        i = tl.arange(0, CHUNK)
        cumulated = tl.load(cumulated_ptr + program.to(tl.int64) * CHUNK + i)
        within = tl.zeros((CHUNK, CHUNK), dtype=tl.float32)
        for first in tl.range(0, K, BK, num_stages=_STAGES):
            row = first + tl.arange(0, BK)
            q = _tokens(q_ptr, start, length, head // GROUP, q_token, q_head, row, K, CHUNK)
            k = _tokens(k_ptr, start, length, head // GROUP, k_token, k_head, row, K, CHUNK)
            within = dot(k, tl.trans(q), within)
        # Rows are keys here: the decay from a key to a later query.
        within *= _decay(-cumulated, -cumulated, i[:, None] <= i[None, :]) * scale
        for first in tl.range(0, V, BV, num_stages=_STAGES):
            column = first + tl.arange(0, BV)
            dout = _tokens(dout_ptr, start, length, head, dout_token, dout_head, column, V, CHUNK)
            local = dot(narrow(within, q_ptr.dtype.element_ty), dout, tl.zeros((CHUNK, BV), dtype=tl.float32))
            _store_plane(local_ptr, local, program, column, V, CHUNK)


@triton.jit
def dstates_kernel(
    q_ptr,
    k_ptr,
    dout_ptr,
    reads_ptr,
    local_ptr,
    cumulated_ptr,
    cu_seqlens_ptr,
    first_chunk_ptr,
    dfinal_ptr,
    dstates_ptr,
    dcorrection_ptr,
    dinitial_ptr,
    q_token,
    q_head,
    k_token,
    k_head,
    dout_token,
    dout_head,
    scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    HAS_DFINAL: tl.constexpr,
    WANT_DINITIAL: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A document's chunks from the last to the first: dS' of the state that leaves each, and its correction's dd."""
    document = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    dtype: tl.constexpr = k_ptr.dtype.element_ty
    row = tl.arange(0, BK)
    column = tl.program_id(1) * BV + tl.arange(0, BV)
    i = tl.arange(0, CHUNK)
    begin = tl.load(cu_seqlens_ptr + document).to(tl.int32)
    end = tl.load(cu_seqlens_ptr + document + 1).to(tl.int32)
    first = tl.load(first_chunk_ptr + document)
    count = tl.load(first_chunk_ptr + document + 1) - first
    dstate = tl.zeros((BK, BV), dtype=tl.float32)
    if HAS_DFINAL:
        dstate += _state(dfinal_ptr, tl.program_id(0), row, column, K, V).to(tl.float32)
    for step in tl.range(0, count, num_stages=STAGES):
        start = begin + (count - 1 - step) * CHUNK
        index = (first + count - 1 - step) * HEADS + head
        held = narrow(dstate, dtype)
        _store_state(dstates_ptr, dstate, index, row, column, K, V)
        q = _tokens(q_ptr, start, end - start, head // GROUP, q_token, q_head, row, K, CHUNK)
        k = _tokens(k_ptr, start, end - start, head // GROUP, k_token, k_head, row, K, CHUNK)
        dout = _tokens(dout_ptr, start, end - start, head, dout_token, dout_head, column, V, CHUNK)
        reads = _plane(reads_ptr, index, row, K, CHUNK)
        local = _plane(local_ptr, index, column, V, CHUNK).to(tl.float32)
        cumulated = tl.load(cumulated_ptr + index.to(tl.int64) * CHUNK + i)
        last = tl.load(cumulated_ptr + index.to(tl.int64) * CHUNK + CHUNK - 1)
        later = dot(k, held, tl.zeros((CHUNK, BV), dtype=tl.float32))
        dcorrection = local + later * tl.exp(last - cumulated)[:, None]
        _store_plane(dcorrection_ptr, dcorrection, index, column, V, CHUNK)
        asked = narrow(dout.to(tl.float32) * (tl.exp(cumulated) * scale)[:, None], dtype)
        dstate = dot(tl.trans(q), asked, dstate * tl.exp(last))
        dstate = dot(tl.trans(reads), narrow(-dcorrection, dtype), dstate)
    if WANT_DINITIAL:
        _store_state(dinitial_ptr, dstate, tl.program_id(0), row, column, K, V)


@triton.jit
def dvalue_kernel(
    v_ptr,
    beta_ptr,
    dout_ptr,
    start_ptr,
    length_ptr,
    cumulated_ptr,
    inverse_ptr,
    correction_ptr,
    dcorrection_ptr,
    x_ptr,
    dwithin_ptr,
    dsystem_ptr,
    dv_ptr,
    drate_ptr,
    v_token,
    v_head,
    dout_token,
    dout_head,
    scale,
    HEADS: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """x, dv, v's part of the rates' gradient, and scale dP L and dA L [chunks * V_heads, CHUNK, CHUNK]."""
    program = tl.program_id(0)
    start = tl.load(start_ptr + program // HEADS)
    length = tl.load(length_ptr + program // HEADS)
    if length > 0:
        head = program % HEADS
        dtype: tl.constexpr = v_ptr.dtype.element_ty
        i = tl.arange(0, CHUNK)
        rate = _scalars(beta_ptr, start, length, head, HEADS, CHUNK)
        cumulated = tl.load(cumulated_ptr + program.to(tl.int64) * CHUNK + i)
        inverse = _plane(inverse_ptr, program, i, CHUNK, CHUNK)
        dwithin = tl.zeros((CHUNK, CHUNK), dtype=tl.float32)
        dsystem = tl.zeros((CHUNK, CHUNK), dtype=tl.float32)
        drate = tl.zeros((CHUNK,), dtype=tl.float32)
        for first in tl.range(0, V, BV, num_stages=_STAGES):
            column = first + tl.arange(0, BV)
            v = _tokens(v_ptr, start, length, head, v_token, v_head, column, V, CHUNK).to(tl.float32)
            dout = _tokens(dout_ptr, start, length, head, dout_token, dout_head, column, V, CHUNK)
            correction = _plane(correction_ptr, program, column, V, CHUNK)
            dcorrection = _plane(dcorrection_ptr, program, column, V, CHUNK)
            x = dot(tl.trans(inverse), dcorrection, tl.zeros((CHUNK, BV), dtype=tl.float32))
            _store_plane(x_ptr, x, program, column, V, CHUNK)
            _store_tokens(dv_ptr, x * rate[:, None], start, length, head, column, HEADS, V, CHUNK)
            drate += tl.sum(x * v, 1)
            dwithin = dot(dout, tl.trans(correction), dwithin)
            dsystem = dot(narrow(-x, dtype), tl.trans(correction), dsystem)
        dwithin *= _decay(cumulated, cumulated, i[:, None] >= i[None, :]) * scale
        dsystem *= _decay(cumulated, cumulated, i[:, None] > i[None, :])
        _store_plane(dwithin_ptr, dwithin, program, i, CHUNK, CHUNK)
        _store_plane(dsystem_ptr, dsystem, program, i, CHUNK, CHUNK)
        tl.store(drate_ptr + program.to(tl.int64) * CHUNK + i, drate)


@triton.jit
def dkey_kernel(
    q_ptr,
    k_ptr,
    beta_ptr,
    dout_ptr,
    start_ptr,
    length_ptr,
    cumulated_ptr,
    states_ptr,
    dstates_ptr,
    correction_ptr,
    x_ptr,
    dwithin_ptr,
    dsystem_ptr,
    drate_ptr,
    dq_ptr,
    dk_ptr,
    dbeta_ptr,
    dg_ptr,
    q_token,
    q_head,
    k_token,
    k_head,
    dout_token,
    dout_head,
    scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """dq and dk of each value head [T, V_heads, K], dbeta and dg [T, V_heads]."""
    program = tl.program_id(0)
    start = tl.load(start_ptr + program // HEADS)
    length = tl.load(length_ptr + program // HEADS)
    if length > 0:
        head = program % HEADS
        dtype: tl.constexpr = k_ptr.dtype.element_ty
        i = tl.arange(0, CHUNK)
        rate = _scalars(beta_ptr, start, length, head, HEADS, CHUNK)
        place = program.to(tl.int64) * CHUNK + i
        cumulated = tl.load(cumulated_ptr + place)
        last = tl.load(cumulated_ptr + program.to(tl.int64) * CHUNK + CHUNK - 1)
        dwithin = _plane(dwithin_ptr, program, i, CHUNK, CHUNK)
        dsystem = _plane(dsystem_ptr, program, i, CHUNK, CHUNK)
        drate = tl.load(drate_ptr + place)
        dcumulated = tl.zeros((CHUNK,), dtype=tl.float32)
        # The state's decay over the chunk, column after column of the states.
        faded = tl.zeros((BV,), dtype=tl.float32)
        for first_row in tl.range(0, K, BK, num_stages=_STAGES):
            row = first_row + tl.arange(0, BK)
            dq = tl.zeros((CHUNK, BK), dtype=tl.float32)
            written = tl.zeros((CHUNK, BK), dtype=tl.float32)
            read = tl.zeros((CHUNK, BK), dtype=tl.float32)
            for first_column in tl.range(0, V, BV, num_stages=_STAGES):
                column = first_column + tl.arange(0, BV)
                dout = _tokens(dout_ptr, start, length, head, dout_token, dout_head, column, V, CHUNK)
                correction = _plane(correction_ptr, program, column, V, CHUNK)
                x = _plane(x_ptr, program, column, V, CHUNK)
                state = _state(states_ptr, program, row, column, K, V)
                dstate = _state(dstates_ptr, program, row, column, K, V)
                dq = dot(dout, tl.trans(state), dq)
                written = dot(correction, tl.trans(dstate), written)
                read = dot(x, tl.trans(state), read)
                faded += tl.sum(state.to(tl.float32) * dstate.to(tl.float32), 0)
            q = _tokens(q_ptr, start, length, head // GROUP, q_token, q_head, row, K, CHUNK)
            k = _tokens(k_ptr, start, length, head // GROUP, k_token, k_head, row, K, CHUNK)
            wide = k.to(tl.float32)
            dq = dot(dwithin, k, dq * (scale * tl.exp(cumulated))[:, None])
            _store_tokens(dq_ptr, dq, start, length, head, row, HEADS, K, CHUNK)
            dcumulated += tl.sum(q.to(tl.float32) * dq, 1)
            # What a key writes fades from its token on: state, output and corrections of later tokens.
            written *= tl.exp(last - cumulated)[:, None]
            dcumulated += tl.where(i == CHUNK - 1, tl.sum(wide * written), 0.0)
            written = dot(tl.trans(dwithin), q, written)
            written = dot(tl.trans(dsystem), narrow(wide * rate[:, None], dtype), written)
            # What it reads has faded until its token.
            read = dot(dsystem, k, -read * tl.exp(cumulated)[:, None])
            drate += tl.sum(wide * read, 1)
            read *= rate[:, None]
            dcumulated += tl.sum(wide * (read - written), 1)
            _store_tokens(dk_ptr, read + written, start, length, head, row, HEADS, K, CHUNK)
        dcumulated += tl.where(i == CHUNK - 1, tl.exp(last) * tl.sum(faded), 0.0)
        # A token's own log decay is part of its own and all later sums of the chunk.
        dg = tl.sum(tl.where(i[:, None] >= i[None, :], dcumulated[:, None], 0.0), 0)
        offset = (start + i).to(tl.int64) * HEADS + head
        tl.store(dg_ptr + offset, narrow(dg, dg_ptr.dtype.element_ty), mask=i < length)
        tl.store(dbeta_ptr + offset, narrow(drate, dbeta_ptr.dtype.element_ty), mask=i < length)


@triton.jit(do_not_specialize=["rows"])
def fold_kernel(
    x_ptr,
    grads_ptr,
    dx_ptr,
    token_stride,
    head_stride,
    rows,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    NORM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The sum of [T, HEADS, GROUP, WIDTH] over a group of value heads, [T, HEADS, WIDTH], and back through the norm."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (column < WIDTH)[None, :]
    place = row.to(tl.int64)[:, None] * WIDTH
    total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for i in tl.static_range(GROUP):
        total += tl.load(grads_ptr + place * GROUP + i * WIDTH + column[None, :], mask=mask, other=0.0).to(tl.float32)
    if NORM:
        offset = (row // HEADS).to(tl.int64) * token_stride + (row % HEADS) * head_stride
        x = tl.load(x_ptr + offset[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
        inverse_norm = tl.rsqrt(tl.sum(x * x, 1) + 1e-6)[:, None]
        x *= inverse_norm
        total = inverse_norm * (total - x * tl.sum(x * total, 1)[:, None])
    tl.store(dx_ptr + place + column[None, :], narrow(total, dx_ptr.dtype.element_ty), mask=mask)
