"""`stacked`: all layers in one pass of plain torch, for every device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from opslot.ops.load_balancing_loss.fused import Backend, make_kernel


def sums(layers: Sequence[Tensor], weights: Tensor | None, top_k: int) -> Tensor:
    """See `Backend.sums`."""
    logits = torch.stack(list(layers))
    probability = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32)).sum(0)
    experts = logits.topk(top_k, dim=-1, sorted=False).indices.flatten()
    if weights is None:
        chosen = torch.bincount(experts, minlength=logits.shape[-1])
        return torch.stack((chosen, probability.sum(0, dtype=torch.float64)))
    weights = weights.double()
    choice_weights = weights.repeat_interleave(top_k).repeat(len(layers))
    chosen = torch.bincount(experts, choice_weights, minlength=logits.shape[-1])
    return torch.stack((chosen, weights @ probability.double()))


def gradients(layers: Sequence[Tensor], weights: Tensor | None, coefficients: Tensor) -> Tensor:
    """See `Backend.gradients`."""
    logits = torch.stack(list(layers))
    probability = logits.softmax(-1, dtype=coefficients.dtype)
    # The gradient is the same for coefficients + constant; the smaller they are, the less cancels.
    coefficients = coefficients - coefficients.min()
    grad = probability * (coefficients - (probability @ coefficients).unsqueeze(-1))
    if weights is not None:
        grad.mul_(weights.unsqueeze(-1))
    return grad.to(logits.dtype)


standard = make_kernel(Backend("stacked", sums, gradients))
