"""`stacked`: all layers in one pass of plain torch, for every device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from opslot.ops.load_balancing_loss.fused import Backend, make_kernel, wide


def forward(layers: Sequence[Tensor], weights: Tensor | None, top_k: int) -> tuple[Tensor, Tensor]:
    """See `Backend.forward`."""
    logits = torch.stack(tuple(layers))
    experts = logits.shape[-1]
    dtype = wide(logits.dtype)
    probability = logits.softmax(-1, dtype=dtype).sum(0)
    choices = logits.topk(top_k, dim=-1, sorted=False).indices.flatten()
    if weights is None:
        chosen = torch.bincount(choices, minlength=experts).double()
        probability = probability.sum(0, dtype=torch.float64)
    else:
        weights = weights.double()
        choice_weights = weights.repeat_interleave(top_k).repeat(len(layers))
        chosen = torch.bincount(choices, choice_weights, minlength=experts)
        probability = weights @ probability.double()
    rows = chosen.sum() / top_k
    # The few numbers left are worth float64: the loss is then rounded once.
    coefficients = chosen * (experts / rows**2)
    return (coefficients @ probability).to(dtype), coefficients.to(dtype)


def backward(layers: Sequence[Tensor], weights: Tensor | None, coefficients: Tensor, grad_loss: Tensor) -> Tensor:
    """See `Backend.backward`."""
    logits = torch.stack(tuple(layers))
    probability = logits.softmax(-1, dtype=coefficients.dtype)
    # The gradient is the same for coefficients + constant; the smaller they are, the less cancels.
    coefficients = (coefficients - coefficients.min()) * grad_loss
    grad = probability.mul(coefficients - (probability @ coefficients).unsqueeze(-1))
    if weights is not None:
        grad.mul_(weights.unsqueeze(-1))
    return grad.to(logits.dtype)


standard = make_kernel(Backend("stacked", forward, backward))
