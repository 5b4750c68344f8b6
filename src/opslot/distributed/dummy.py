"""Dummy forward for a rank whose batch has no input for a module, such as no images for a vision encoder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


def dummy_forward(module: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
    """Run `module` on dummy inputs, so that the other ranks do not wait for this one.

    FSDP's collectives for a module's parameters and gradients need all ranks, so a module that runs on one rank must
    run on all of them, forward and backward.

    Args:
        module: what the other ranks run, a module or a method of one.
        args, kwargs: valid inputs of any values with finite derivatives, as small as possible. FSDP casts them to
            param_dtype.

    Returns:
        A zero [] with zero gradients for the parameters of `module`. Add it where the other ranks add the outputs, e.g.
        to the input embeddings, so that all ranks run the backward of `module` at the same point.
    """
    outputs = pytree.tree_leaves(module(*args, **kwargs))
    return torch.stack([x.flatten()[:0].sum() for x in outputs if isinstance(x, Tensor)]).sum()
