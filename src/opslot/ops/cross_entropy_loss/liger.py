"""`liger_kernel`: Liger's fused linear cross entropy, with the weight's gradient summed in float32.

By default Liger accumulates 16-bit gradients over dozens of chunks, and each rounds the sum, unlike eager code. The
float32 accumulator takes 4 bytes per weight while the loss runs.
"""

from __future__ import annotations

import torch
from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy
from torch import Tensor

from opslot.ops._common.contract import variants_of
from opslot.ops.cross_entropy_loss.contract import LOSSES, LossInputs
from opslot.ops.cross_entropy_loss.fused import flat_inputs, loss_divisor


def _loss(inputs: LossInputs) -> Tensor:
    hidden_states, weight, bias, labels, ignore_index, softcap, logit_scale, _, num_items, label_smoothing = inputs
    # Scale the hidden states, which are smaller than the logits; exact for a power of two.
    if logit_scale != 1.0:
        hidden_states = hidden_states * logit_scale
        bias = None if bias is None else bias * logit_scale
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


causal, sequence_classification = variants_of(_loss, LOSSES)
