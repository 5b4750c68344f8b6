"""`aligned`: cuBLAS on sizes that are padded with zeros to multiples of 16 bytes.

cuBLAS's fast kernels take no others. With 3420 features, those of Qwen2.5-VL's vision MLP, its matmuls run at a third
of their speed on an H200. Outputs and gradients of such a width have padding in memory, which the next kernel uses
(`aligned_rows`); weights, and inputs of other kernels, are copied.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from opslot.ops._common.aligned_rows import (
    empty_rows,
    mark_padded,
    padded_width,
    view_without_padding,
    with_padding,
)
from opslot.ops._common.custom_op import differentiable_op, no_view
from opslot.ops.linear.arguments import checked

_KERNEL = "linear_implementation='aligned'"


def standard(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`op.standard`, in autocast's dtype where autocast is on. Rows of the output may have padding.

    Raises:
        KernelError: unsupported shapes or dtypes.
    """
    return mark_padded(_linear(*checked(_KERNEL, input, weight, bias)))


# 16 bytes, in elements of 16 bits.
_ALIGNED = 8
# The time of smaller layers is that of launches.
_SMALL = 256


def is_unaligned(weight: Tensor) -> bool:
    """Whether a weight that is not small has a size that is not a multiple of 16 bytes in 16 bits."""
    return weight.dim() == 2 and min(weight.shape) >= _SMALL and any(size % _ALIGNED for size in weight.shape)


def padded_weight(weight: Tensor) -> Tensor:
    """weight [V, K] or [V] with zeros up to multiples of 16 bytes in all dims."""
    missing = [padded_width(size, weight.dtype) - size for size in reversed(weight.shape)]
    return F.pad(weight, [side for size in missing for side in (0, size)]) if any(missing) else weight


def _forward(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out = F.linear(with_padding(input), padded_weight(weight), None if bias is None else padded_weight(bias))
    with no_view():
        return view_without_padding(out, *input.shape[:-1], len(weight))


def _allocate_gradients(
    dout: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None, *needs: bool
) -> tuple[Tensor | None, ...]:
    of_input = empty_rows(input, *input.shape) if needs[0] else None
    of_weight = torch.empty_like(weight, memory_format=torch.contiguous_format) if needs[1] else None
    return of_input, of_weight, torch.empty_like(bias) if needs[2] and bias is not None else None


def _backward(
    dout: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None, *needs: bool
) -> tuple[Tensor | None, ...]:
    rows = with_padding(dout)
    outputs, width = weight.shape
    need_input, need_weight, need_bias = needs
    of_input = of_weight = of_bias = None
    if need_input:
        of_input = view_without_padding(rows @ padded_weight(weight), *input.shape)
    if need_weight:
        of_weight = (rows.t() @ with_padding(input))[:outputs, :width].contiguous()
    if need_bias and bias is not None:
        of_bias = rows.sum(0)[:outputs].contiguous()
    return of_input, of_weight, of_bias


_linear: Any = differentiable_op(
    "aligned_linear(Tensor input, Tensor weight, Tensor? bias) -> Tensor",
    allocate=lambda input, weight, bias: empty_rows(input, *input.shape[:-1], len(weight)),
    launch=_forward,
    allocate_gradients=_allocate_gradients,
    launch_backward=_backward,
    in_place=False,
    module=__name__,
)
