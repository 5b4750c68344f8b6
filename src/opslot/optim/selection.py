"""Makes the optimizer of a training run."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from opslot._base.device import facts_of, has_package
from opslot._base.errors import ConfigError
from opslot._base.logging import get_logger
from opslot.slots import KERNEL_REGISTRY, KernelRequest, OpsImplementationConfig, Resolution, bound_config

logger = get_logger(__name__)


def optimizer_class(name: str, model: nn.Module) -> Callable[..., torch.optim.Optimizer]:
    """What makes the optimizer `name`, one of adamw, adamw_torch, adamw_8bit and muon, from parameter groups.

    Raises:
        ConfigError: a package is missing, or cannot run on the model's device.
    """
    if name == "adamw":
        return adamw_of(model)
    if name == "adamw_8bit":
        return _adamw_8bit(model)
    if name == "muon":
        from opslot.optim.muon import Muon

        return Muon
    return functools.partial(torch.optim.AdamW, fused=True)


def adamw_of(model: nn.Module) -> Callable[..., torch.optim.AdamW]:
    """torch's fused AdamW, or the optimizer of the kernel that `adamw_implementation` names or `auto` selects."""
    chosen = adamw_kernel(model).chosen
    if chosen == "eager":
        return functools.partial(torch.optim.AdamW, fused=True)
    logger.info("AdamW steps through the kernel %r", chosen)
    return KERNEL_REGISTRY.load("adamw", "standard", chosen).optimizer  # type: ignore[attr-defined]


def adamw_kernel(model: nn.Module) -> Resolution:
    """The kernel of AdamW that `adamw_implementation` names or `auto` selects, and why; "eager" is torch's fused AdamW.

    Raises:
        ConfigError: the named kernel cannot run on the model's device.
    """
    config = bound_config(model) or OpsImplementationConfig()
    parameter = next(model.parameters())
    request = KernelRequest("adamw", "standard", facts_of(parameter.device), parameter.dtype)
    return KERNEL_REGISTRY.resolve(request, config.choice("adamw", "standard"))


def eight_bit_problem(sharded: bool, on_gpu: bool) -> str | None:
    """Why adamw_8bit cannot run here, or None."""
    if has_package("torchao"):
        return None
    if not has_package("bitsandbytes"):
        return "adamw_8bit needs torchao; pip install torchao"
    if sharded:
        return "adamw_8bit of bitsandbytes cannot update sharded parameters; pip install torchao"
    return None if on_gpu else "adamw_8bit of bitsandbytes needs a GPU; pip install torchao"


def _adamw_8bit(model: nn.Module) -> Callable[..., torch.optim.Optimizer]:
    trained = [p for p in model.parameters() if p.requires_grad]
    problem = eight_bit_problem(any(isinstance(p, DTensor) for p in trained), all(p.is_cuda for p in trained))
    if problem:
        raise ConfigError(problem)
    if has_package("torchao"):
        from torchao.optim import AdamW8bit

        return AdamW8bit
    from bitsandbytes.optim import AdamW8bit as BitsAndBytesAdamW

    return BitsAndBytesAdamW
