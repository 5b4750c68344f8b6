"""Heads padded with zeros to a size that a kernel computes, and cut again: one copy of several tensors in each way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from opslot.ops._common.custom_op import custom_op, once_differentiable, variadic
from opslot.ops._common.specs import runs_triton


def resize_heads(tensors: Sequence[Tensor], widths: Sequence[int]) -> tuple[Tensor, ...]:
    """Tensors [B, S, heads, D] or [S, heads, D] with D cut, or padded with zeros, to one of `widths` each.

    A tensor of that width is returned as it is, and the others contiguous. Gradients that are cut are views.
    """
    results = list(tensors)
    changed = [i for i, (x, width) in enumerate(zip(tensors, widths, strict=True)) if x.shape[-1] != width]
    if changed:
        resized = _Resize.apply([widths[i] for i in changed], *[tensors[i] for i in changed])
        for i, x in zip(changed, resized, strict=True):
            results[i] = x
    return tuple(results)


class _Resize(torch.autograd.Function):
    @staticmethod
    @variadic
    def forward(ctx: Any, widths: list[int], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.widths = [x.shape[-1] for x in tensors]
        ctx.set_materialize_grads(False)
        return tuple(_resize(list(tensors), widths))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *douts: Tensor | None) -> tuple[Tensor | None, ...]:
        needed = [dout if need else None for dout, need in zip(douts, ctx.needs_input_grad[1:], strict=True)]
        # A cut gradient is a view: the kernels before attention read heads of any stride.
        gradients = [None if x is None else x[..., :width] for x, width in zip(needed, ctx.widths, strict=True)]
        padded = [i for i, x in enumerate(gradients) if x is not None and x.shape[-1] < ctx.widths[i]]
        if padded:
            resized = _resize([gradients[i] for i in padded], [ctx.widths[i] for i in padded])
            for i, x in zip(padded, resized, strict=True):
                gradients[i] = x
        return None, *gradients


def _allocate(tensors: list[Tensor], widths: list[int]) -> list[Tensor]:
    return [x.new_empty(*x.shape[:-1], width) for x, width in zip(tensors, widths, strict=True)]


def _run(tensors: list[Tensor], widths: list[int]) -> list[Tensor]:
    if not runs_triton(tensors[0]):
        # F.pad with a negative width cuts columns.
        return [F.pad(x, (0, width - x.shape[-1])).contiguous() for x, width in zip(tensors, widths, strict=True)]
    from opslot.ops._common.kernels.heads import resize_heads

    targets = _allocate(tensors, widths)
    resize_heads(tensors, targets)
    return targets


_resize = custom_op("resize_heads(Tensor[] tensors, int[] widths) -> Tensor[]", _run, _allocate)
