"""The gradient of attention sinks, for kernels that compute only the other gradients.

Shapes: B batch, S tokens, N heads, D head size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from opslot._base.kernel_launch import KernelLauncher, cdiv
from opslot.ops._common.arguments import adjacent

_ELEMENTS = 8192


@triton.jit(do_not_specialize=["tokens"])
def _gradient_kernel(
    sinks_ptr,
    lse_ptr,
    out_ptr,
    dout_ptr,
    partial_ptr,
    out_batch_stride,
    out_token_stride,
    out_head_stride,
    dout_batch_stride,
    dout_token_stride,
    dout_head_stride,
    tokens,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """`partial` [B, blocks of tokens, N]: minus the sum of a sink's weights times the products of out and dout."""
    block, head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads = tl.num_programs(1)
    token = block * TOKENS + tl.arange(0, TOKENS).to(tl.int64)
    column = tl.arange(0, COLUMNS)[None, :]
    inside = token < tokens
    mask = inside[:, None] & (column < WIDTH)
    b64 = b.to(tl.int64)
    out_ptr += b64 * out_batch_stride + head * out_head_stride
    dout_ptr += b64 * dout_batch_stride + head * dout_head_stride
    out = tl.load(out_ptr + token[:, None] * out_token_stride + column, mask=mask, other=0.0).to(tl.float32)
    dout = tl.load(dout_ptr + token[:, None] * dout_token_stride + column, mask=mask, other=0.0).to(tl.float32)
    lse = tl.load(lse_ptr + (b64 * heads + head) * tokens + token, mask=inside, other=float("inf"))
    weight = tl.exp(tl.load(sinks_ptr + head).to(tl.float32) - lse)
    total = tl.sum(weight * tl.sum(out * dout, axis=1), axis=0)
    tl.store(partial_ptr + (b64 * tl.num_programs(0) + block) * heads + head, -total)


_launch = KernelLauncher(_gradient_kernel)


def sinks_gradient(sinks: Tensor, lse: Tensor, out: Tensor, dout: Tensor) -> Tensor:
    """The gradient of `sinks` [N], in its dtype; summed in a fixed order.

    A sink s is one more logit of every softmax, without a value: its weight is exp(s - lse), and the gradient of its
    logit minus this weight times the product of the output and its gradient.

    Args:
        lse: contiguous float32 [B, N, S] (or [N, S]), the natural logarithm of the softmax's sum, with the sink.
        out, dout: the output and its gradient, [B, S, N, D] (or [S, N, D]).
    """
    out, dout = (adjacent(x.unsqueeze(0) if x.dim() == 3 else x) for x in (out, dout))
    batch, tokens, heads, width = out.shape
    columns = triton.next_power_of_2(width)
    block = max(_ELEMENTS // columns, 16)
    blocks = cdiv(tokens, block)
    if not out.numel():
        return torch.zeros_like(sinks)
    partial = lse.new_empty(batch * blocks, heads)
    _launch(
        (blocks, heads, batch),
        (sinks, lse, out, dout, partial),
        (*out.stride()[:3], *dout.stride()[:3]),
        (tokens,),
        (width, block, columns),
        4,
    )
    return partial.sum(0).to(sinks.dtype)
