"""quack-kernels: what no registered kernel of opslot wraps."""

from __future__ import annotations

from quack.linear_cross_entropy import chunked_linear_cross_entropy
from torch import Tensor

from opslot.ops._common.contract import takes
from opslot.ops.cross_entropy_loss.contract import LossInputs, causal


@takes(causal)
def _causal(inputs: LossInputs) -> Tensor:
    num_items, label_smoothing = inputs.num_items_in_batch, inputs.label_smoothing
    given = {"softcap": inputs.softcap, "logit_scale": inputs.logit_scale != 1.0, "label_smoothing": label_smoothing}
    unsupported = [name for name, asked in given.items() if asked]
    if unsupported:
        raise NotImplementedError(f"no {', '.join(unsupported)}")
    reduction = "mean" if num_items is None else "sum"
    flat = inputs.hidden_states.reshape(-1, inputs.hidden_states.shape[-1])
    # Its tuner compiles every one of its tilings for each shape, which takes minutes.
    loss = chunked_linear_cross_entropy(
        flat, inputs.weight, inputs.labels.reshape(-1), reduction=reduction, tuned=False
    )
    return loss if num_items is None else loss / num_items


KERNELS = {("cross_entropy_loss", "causal"): {"chunked": _causal}}
