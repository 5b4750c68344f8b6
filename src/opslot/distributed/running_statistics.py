"""Running statistics of batch norms, which are not parameters: no optimizer and no gradient reduction updates them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from opslot._base.source import source_of

_MOMENTUM = "_momentum_of_forward"


def keep_frozen_statistics(model: nn.Module) -> None:
    """Let batch norms that are not trained normalize with their running statistics, and leave these unchanged.

    One without parameters is trained where the module that contains it is. Those of an image tokenizer (Emu3) are not:
    its constructor sets it to evaluation, and it gets no gradients.
    """
    in_evaluation = {part for module in model.modules() if _evaluates(type(module)) for part in module.modules()}
    for norm, holder in _norms(model):
        parameters = list(norm.parameters()) or list(holder.parameters())
        is_frozen = bool(parameters) and not any(parameter.requires_grad for parameter in parameters)
        if is_frozen or norm in in_evaluation:
            norm.register_forward_pre_hook(_use_running_statistics)


def update_statistics_once(model: nn.Module) -> None:
    """Let batch norms of checkpointed layers update their statistics in the forward pass, not again in backward."""
    for norm, _ in _norms(model):
        norm.register_forward_pre_hook(_hold_statistics)
        # A recomputation ends with an exception when it has what the backward pass needs.
        norm.register_forward_hook(_release_statistics, always_call=True)


@torch.no_grad()
def average_statistics(model: nn.Module) -> None:
    """Set the running statistics of trained batch norms to their mean over all ranks.

    Each rank's are those of its own micro batches; a checkpoint and an evaluation have one of them.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    buffers: dict[torch.dtype, list[torch.Tensor]] = {}
    for norm, _ in _norms(model):
        if _use_running_statistics not in norm._forward_pre_hooks.values():
            for buffer in norm.buffers():
                if buffer.is_floating_point():
                    buffers.setdefault(buffer.dtype, []).append(buffer)
    for same_dtype in buffers.values():
        mean = torch.cat([buffer.flatten() for buffer in same_dtype]).float()
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
        for buffer, part in zip(same_dtype, mean.split([buffer.numel() for buffer in same_dtype]), strict=True):
            buffer.copy_(part.view_as(buffer))


def _evaluates(cls: Any) -> bool:
    """Whether the constructor of a class sets its instances to evaluation."""
    return "self.eval()" in source_of(cls.__init__)


def _norms(model: nn.Module) -> Iterator[tuple[_BatchNorm, nn.Module]]:
    """The batch norms with running statistics, each with the module that contains it."""
    for holder in model.modules():
        for norm in holder.children():
            if isinstance(norm, _BatchNorm) and norm.running_mean is not None:
                yield norm, holder


def _use_running_statistics(norm: nn.Module, args: Any) -> None:
    """Forward pre-hook: `model.train()` reaches frozen modules too."""
    norm.training = False


def _hold_statistics(norm: Any, args: Any) -> None:
    """Forward pre-hook."""
    if norm.training and not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:
        # The statistics stay arguments, so that the same tensors are saved for the backward pass.
        norm.__dict__[_MOMENTUM] = norm.momentum
        norm.momentum = 0.0


def _release_statistics(norm: Any, args: Any, output: Any) -> None:
    """Forward hook."""
    if _MOMENTUM in norm.__dict__:
        norm.momentum = norm.__dict__.pop(_MOMENTUM)
        norm.num_batches_tracked.sub_(1)
