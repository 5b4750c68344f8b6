"""q, k and v as views of one projection, whose gradients one launch gathers from any strides."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from opslot.ops._common.arguments import reject, require_floats
from opslot.ops._common.custom_op import launch_op, once_differentiable
from opslot.ops._common.kernels.heads import stack_heads

_LABEL = "unbind_qkv_implementation='triton'"


def standard(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`op.standard` for float32, bfloat16 and float16."""
    require_floats(_LABEL, qkv=qkv)
    if qkv.dim() not in (4, 5) or qkv.shape[-3] != 3:
        reject(_LABEL, "qkv", f"its shape is {tuple(qkv.shape)}, not [(B,) S, 3, heads, D]", "use eager")
    return _UnbindQkv.apply(qkv, None)


def sliced(qkv: Tensor, query_end: int, key_end: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """`op.sliced` for float32, bfloat16 and float16."""
    require_floats(_LABEL, qkv=qkv)
    if qkv.dim() not in (2, 3) or not 0 < query_end < key_end < qkv.shape[-1]:
        reject(_LABEL, "qkv", f"its shape is {tuple(qkv.shape)}, not [(B,) S, channels of q, k and v]", "use eager")
    widths = (query_end, key_end - query_end, qkv.shape[-1] - key_end)
    return _UnbindQkv.apply(qkv.unflatten(-1, (-1, head_dim)), [width // head_dim for width in widths])


def _allocate(dq: Tensor, dk: Tensor, dv: Tensor) -> Tensor:
    heads = sum([x.shape[-2] for x in (dq, dk, dv)])
    return dq.new_empty(*dq.shape[:-2], heads, dq.shape[-1])


def _gather(out: Tensor, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
    stack_heads((dq, dk, dv), out)


_stack = launch_op("stack_heads(Tensor dq, Tensor dk, Tensor dv) -> Tensor", _allocate, _gather)


class _UnbindQkv(torch.autograd.Function):
    """Of [..., 3, heads, D]; with numbers of `heads`, of [..., sum of heads, D]."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, heads: list[int] | None) -> tuple[Tensor, ...]:
        ctx.stacked = heads is None
        return qkv.unbind(-3) if heads is None else qkv.split(heads, -2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *douts: Tensor) -> tuple[Tensor, None]:
        dqkv = _stack(*douts)
        return dqkv.unflatten(-2, (3, -1)) if ctx.stacked else dqkv, None
