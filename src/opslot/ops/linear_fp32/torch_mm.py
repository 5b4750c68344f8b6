"""A linear layer in float32 from bfloat16 operands: their products are exact in float32, so no copy is needed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from opslot.ops._common.arguments import autocast_dtype, reject
from opslot.ops._common.custom_op import once_differentiable
from opslot.ops.linear_fp32.op import standard as reference

_LABEL = "linear_fp32_implementation='torch_mm'"


def standard(x: Tensor, weight: Tensor) -> Tensor:
    """`op.standard` for weights in bfloat16. Hidden states of another dtype are computed with as Transformers does.

    Under autocast the result has its dtype, as that of `F.linear`.
    """
    if weight.dtype != torch.bfloat16:
        reject(_LABEL, "weight", f"its dtype is {weight.dtype}, not bfloat16", "use eager")
    if x.dtype != torch.bfloat16:
        return reference(x, weight)
    out = _LinearFp32.apply(x.flatten(0, -2), weight).unflatten(0, x.shape[:-1])
    dtype = autocast_dtype(x)
    return out if dtype is None else out.to(dtype)


def _mm(a: Tensor, b: Tensor) -> Tensor:
    """The product of bfloat16 matrices in float32; CPUs have no such matmul."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


def _split(x: Tensor, dim: int) -> Tensor:
    """`x` as two bfloat16 tensors whose sum has 16 bits of its mantissa, one after the other along `dim`."""
    high = x.bfloat16()
    return torch.cat([high, (x - high).bfloat16()], dim)


class _LinearFp32(torch.autograd.Function):
    """The gradient of the output, in float32, is split in two, which matmuls of bfloat16 add up again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _mm(x, weight.mT)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        dx = dweight = None
        if ctx.needs_input_grad[0]:
            dx = _split(dout, 1) @ torch.cat([weight, weight])
        if ctx.needs_input_grad[1]:
            high, low = _mm(_split(dout.mT, 0), x).chunk(2)
            dweight = (high + low).bfloat16()
        return dx, dweight
