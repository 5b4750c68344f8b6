"""AdamW and its learning rate schedule."""

from __future__ import annotations

import math

import torch
from torch import nn

from opslot._base.logging import get_logger
from opslot.optim.selection import adamw_of
from opslot.trainer.config import TrainConfig

logger = get_logger(__name__)


def build_optimizer(model: nn.Module, train: TrainConfig) -> torch.optim.AdamW:
    """AdamW over the trainable parameters; weight decay on matrices that are not embeddings."""
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    decayed: list[nn.Parameter] = []
    undecayed: list[nn.Parameter] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            (decayed if parameter.ndim >= 2 and id(parameter) not in embeddings else undecayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": train.weight_decay}, {"params": undecayed, "weight_decay": 0.0}]
    return adamw_of(model)(
        [group for group in groups if group["params"]],
        lr=train.lr,
        betas=(train.optimizer.beta1, train.optimizer.beta2),
        eps=train.optimizer.eps,
    )


def learning_rate(train: TrainConfig, step: int, max_steps: float) -> float:
    """Learning rate of step `step` (the first is 1) of `max_steps`.

    It rises linearly to `lr` at `warmup_steps`, then follows the scheduler down to `lr * min_lr_ratio`, which it would
    reach one step after the last.
    """
    if step <= train.warmup_steps:
        return train.lr * step / train.warmup_steps
    done = (step - train.warmup_steps) / (max_steps + 1 - train.warmup_steps)
    lowest = train.optimizer.min_lr_ratio
    factor = {
        "constant": 1.0,
        "linear": lowest + (1 - lowest) * (1 - done),
        "cosine": lowest + (1 - lowest) * 0.5 * (1 + math.cos(math.pi * done)),
    }[train.lr_scheduler]
    return train.lr * factor
