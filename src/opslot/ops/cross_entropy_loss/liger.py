"""`liger_kernel`: Liger's fused linear cross entropy, with the weight's gradient summed in float32.

By default Liger accumulates 16-bit gradients over dozens of chunks, and each rounds the sum, unlike eager code. The
float32 accumulator takes 4 bytes per weight while the loss runs.
"""

from __future__ import annotations

from typing import Any

import torch
from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy
from torch import Tensor

from opslot.ops.cross_entropy_loss.fused import flat_inputs, loss_divisor, shifted


def causal(
    hidden_states: Tensor,
    weight: Tensor,
    labels: Tensor,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    **kwargs: Any,
) -> Tensor:
    if shift_labels is None:
        shift_labels = shifted(labels, ignore_index)
    # Scale the hidden states, which are smaller than the logits; exact for a power of two.
    if logit_scale != 1.0:
        hidden_states = hidden_states * logit_scale
        bias = None if bias is None else bias * logit_scale
    return _loss(hidden_states, weight, bias, shift_labels, num_items_in_batch, ignore_index, label_smoothing, softcap)


def sequence_classification(
    hidden_states: Tensor,
    weight: Tensor,
    labels: Tensor,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    *,
    bias: Tensor | None = None,
    label_smoothing: float = 0.0,
    **kwargs: Any,
) -> Tensor:
    return _loss(hidden_states, weight, bias, labels, num_items_in_batch, ignore_index, label_smoothing, None)


def _loss(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    num_items: Tensor | int | None,
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None,
) -> Tensor:
    hidden, weight, bias, labels = flat_inputs("liger_kernel", hidden_states, weight, bias, labels)
    divisor = loss_divisor("liger_kernel", labels, num_items, ignore_index, torch.float32)
    if not hidden.shape[0]:
        # Liger divides by the number of chunks.
        unused = 0.0 * weight.sum() + (0.0 if bias is None else 0.0 * bias.sum())
        return (hidden.sum() + unused).float() / divisor
    loss = liger_fused_linear_cross_entropy(
        hidden,
        weight,
        labels,
        bias,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction="mean" if num_items is None else "sum",
        softcap=softcap or None,
        accum_dtype=torch.float32,
    )
    # If all labels are ignored, Liger's mean is 0; the contract requires NaN.
    return torch.where(divisor == 0, float("nan"), loss) if num_items is None else loss / divisor
