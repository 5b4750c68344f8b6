"""For a rank whose batch has nothing for a part of the model, such as images for a vision encoder."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree


def dummy_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    """Run `module` on inputs that count for nothing, so that no other rank waits for this one.

    FSDP gathers a module's parameters and adds up their gradients with all ranks, so a module that runs on one of them
    has to run on each, forward and backward.

    Args:
        module: what the other ranks run.
        args, kwargs: inputs that it takes, of any values with finite derivatives, and as small as it allows. FSDP casts
            them to the dtype that it computes in.

    Returns:
        A zero [], which brings a zero gradient to what `module` computed with. Add it where the other ranks put the
        outputs, e.g. to the input embeddings: then the backward pass comes to `module` at the same moment on each.
    """
    outputs = pytree.tree_leaves(module(*args, **kwargs))
    return torch.stack([x.flatten()[:0].sum() for x in outputs if isinstance(x, Tensor)]).sum()
