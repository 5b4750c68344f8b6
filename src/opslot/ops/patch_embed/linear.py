"""Patch embedding as a matmul: cuDNN has no fast kernel for convolutions with stride = kernel size."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from opslot.ops._common.arguments import reject


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`op.standard` as one matmul with the weight as a matrix [D, C * patch], a view.

    `x` is cast to the dtype of the weight, as the convolution's pre-hook does under mixed precision.
    """
    patch, dims = weight.shape[2:], weight.dim() - 2
    if x.dim() == dims + 1:
        # As torch's convolutions, one input without N.
        return linear(x.unsqueeze(0), weight, bias).squeeze(0)
    if x.dim() != dims + 2 or any(size < length for size, length in zip(x.shape[2:], patch)):
        found = f"shape {tuple(x.shape)}, smaller than one patch of {tuple(weight.shape[1:])}"
        reject("patch_embed_implementation='linear'", "x", found, "pass inputs of at least one patch")
    if bias is not None and bias.shape != weight.shape[:1]:
        found = f"shape {tuple(bias.shape)} beside weight {tuple(weight.shape)}"
        reject("patch_embed_implementation='linear'", "bias", found, "give it one element per output channel")
    counts = [size // length for size, length in zip(x.shape[2:], patch, strict=True)]
    # [N, C, counts and patch lengths alternating], of which `reshape` copies nothing if patches were cut before.
    for dim in reversed(range(dims)):
        x = x.narrow(2 + dim, 0, counts[dim] * patch[dim]).unflatten(2 + dim, (counts[dim], patch[dim]))
    x = x.permute(0, *range(2, 2 + 2 * dims, 2), 1, *range(3, 3 + 2 * dims, 2))
    out = F.linear(x.flatten(1 + dims).to(weight.dtype), weight.flatten(1), bias)
    return out.movedim(-1, 1)
