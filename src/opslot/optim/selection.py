"""Selects the AdamW implementation of a training run."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import nn

from opslot._base.device import facts_of
from opslot._base.logging import get_logger
from opslot.slots import KERNEL_REGISTRY, KernelRequest, OpsImplementationConfig, bound_config

logger = get_logger(__name__)


def adamw_of(model: nn.Module) -> Callable[..., torch.optim.AdamW]:
    """torch's fused AdamW, or the optimizer of the kernel that `adamw_implementation` names or `auto` selects."""
    config = bound_config(model) or OpsImplementationConfig()
    parameter = next(model.parameters())
    request = KernelRequest("adamw", "standard", facts_of(parameter.device), parameter.dtype)
    chosen = KERNEL_REGISTRY.resolve(request, config.choice("adamw", "standard")).chosen
    if chosen == "eager":
        return functools.partial(torch.optim.AdamW, fused=True)
    logger.info("AdamW steps through the kernel %r", chosen)
    return KERNEL_REGISTRY.load("adamw", "standard", chosen).optimizer  # type: ignore[attr-defined]
