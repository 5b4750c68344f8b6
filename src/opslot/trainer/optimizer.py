"""AdamW and its learning rate schedule."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import nn

from opslot._base.logging import get_logger
from opslot.optim.selection import adamw_of
from opslot.trainer.config import TrainConfig

logger = get_logger(__name__)


def build_optimizer(
    model: nn.Module, train: TrainConfig, lr_of: Mapping[str, float] | None = None
) -> torch.optim.AdamW:
    """AdamW over the trainable parameters; weight decay on matrices that are not embeddings.

    Args:
        lr_of: peak learning rate of parameters, by name, where it differs from `train.lr`. Each group has its
            "lr_scale", the ratio of both.
    """
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    groups: dict[tuple[float, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            decayed = parameter.ndim >= 2 and id(parameter) not in embeddings
            scale = (lr_of or {}).get(name, train.lr) / train.lr
            groups.setdefault((scale, decayed), []).append(parameter)
    return adamw_of(model)(
        [
            {"params": members, "weight_decay": train.weight_decay if decayed else 0.0, "lr_scale": scale}
            for (scale, decayed), members in sorted(groups.items(), key=lambda item: (-item[0][0], not item[0][1]))
        ],
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
