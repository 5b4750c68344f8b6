"""The next streams from a layer's output and the streams before it, and their gradients; one token per program.

Streams are [rows, N, D], contiguous.
"""

import triton
import triton.language as tl


@triton.jit
def _coefficients(post_ptr, comb_ptr, row, N: tl.constexpr, MIXED: tl.constexpr):
    """post [N], and comb [N, N] by stream and next stream."""
    n = tl.arange(0, N)
    post = tl.load(post_ptr + row * N + n).to(tl.float32)
    comb = tl.zeros((N, N), tl.float32)
    if MIXED:
        comb = tl.load(comb_ptr + row * (N * N) + n[:, None] * N + n[None, :]).to(tl.float32)
    return post, comb


@triton.jit
def mix_kernel(
    post_ptr,
    comb_ptr,
    output_ptr,
    x_ptr,
    next_ptr,
    output_stride,
    D: tl.constexpr,
    N: tl.constexpr,
    MIXED: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """next[k] = post[k] output + sum over j of comb[j, k] x[j]; without MIXED the sum is x[k]."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    n = tl.arange(0, N)
    offsets = row * (N * D) + n[:, None] * D + d[None, :]
    mask = (d < D)[None, :]
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    post, comb = _coefficients(post_ptr, comb_ptr, row, N, MIXED)
    if MIXED:
        x = tl.sum(comb[:, :, None] * x[:, None, :], 0)
    output = tl.load(output_ptr + row * output_stride + d, mask=d < D, other=0.0).to(tl.float32)
    tl.store(next_ptr + offsets, x + post[:, None] * output[None, :], mask=mask)


@triton.jit
def mix_gradient_kernel(
    post_ptr,
    comb_ptr,
    output_ptr,
    x_ptr,
    dnext_ptr,
    dpost_ptr,
    dcomb_ptr,
    doutput_ptr,
    dx_ptr,
    output_stride,
    D: tl.constexpr,
    N: tl.constexpr,
    MIXED: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, N)
    post, comb = _coefficients(post_ptr, comb_ptr, row, N, MIXED)
    dpost = tl.zeros((N, COLUMNS), tl.float32)
    # Summed over columns once, at the end.
    dcomb = tl.zeros((N, N, COLUMNS), tl.float32)
    for start in range(0, D, COLUMNS):
        d = start + tl.arange(0, COLUMNS)
        mask = (d < D)[None, :]
        offsets = row * (N * D) + n[:, None] * D + d[None, :]
        dnext = tl.load(dnext_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        output = tl.load(output_ptr + row * output_stride + d, mask=d < D, other=0.0).to(tl.float32)
        dpost += dnext * output[None, :]
        tl.store(doutput_ptr + row * D + d, tl.sum(dnext * post[:, None], 0), mask=d < D)
        if MIXED:
            x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
            dcomb += x[:, None, :] * dnext[None, :, :]
            tl.store(dx_ptr + offsets, tl.sum(comb[:, :, None] * dnext[None, :, :], 1), mask=mask)
    tl.store(dpost_ptr + row * N + n, tl.sum(dpost, 1))
    if MIXED:
        tl.store(dcomb_ptr + row * (N * N) + n[:, None] * N + n[None, :], tl.sum(dcomb, 2))
