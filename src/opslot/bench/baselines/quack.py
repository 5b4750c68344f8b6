"""quack-kernels: what no registered kernel of opslot wraps."""

from __future__ import annotations

from typing import Any

from quack.linear_cross_entropy import chunked_linear_cross_entropy
from torch import Tensor
from torch.nn import functional as F


def _causal(
    hidden_states: Tensor, weight: Tensor, labels: Tensor, num_items_in_batch: Any = None, **options: Any
) -> Tensor:
    unsupported = [name for name in ("softcap", "logit_scale", "label_smoothing") if name in options]
    if unsupported:
        raise NotImplementedError(f"no {', '.join(unsupported)}")
    shifted = options.get("shift_labels")
    if shifted is None:
        shifted = F.pad(labels, (0, 1), value=-100)[..., 1:]
    reduction = "mean" if num_items_in_batch is None else "sum"
    flat = hidden_states.reshape(-1, hidden_states.shape[-1])
    # Its tuner compiles every one of its tilings for each shape, which takes minutes.
    loss = chunked_linear_cross_entropy(flat, weight, shifted.reshape(-1), reduction=reduction, tuned=False)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


KERNELS = {("cross_entropy_loss", "causal"): {"chunked": _causal}}
