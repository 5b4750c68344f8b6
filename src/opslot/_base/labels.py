"""Labels of causal language models."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

# The label of a token that is not trained.
IGNORE_INDEX = -100


def shifted_labels(labels: Tensor, ignore_index: int = IGNORE_INDEX) -> Tensor:
    """[..., S]: labels of the next position; the last position of a sequence gets `ignore_index`."""
    return F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
