"""The optimizer of a run, its parameter groups and its learning rate schedule."""

from __future__ import annotations

import fnmatch
import math
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from opslot._base.errors import ConfigError
from opslot.models._build import classifier_heads
from opslot.models._multimodal.parts import select
from opslot.ops.cross_entropy_loss.op import head_of
from opslot.optim.selection import optimizer_class
from opslot.trainer.config import OptimizerConfig, TrainConfig


def build_optimizer(model: nn.Module, train: TrainConfig) -> torch.optim.Optimizer:
    """The optimizer of the trainable parameters; weight decay on matrices (`_is_matrix`) that are not embeddings.

    Each group has its "lr_scale", the ratio of its peak learning rate to `train.lr`.

    Raises:
        ConfigError: `train.lr_of` matches no parameter, or `train.optimizer.groups` no trainable one; or the optimizer
            cannot run here.
    """
    lr_of = {name: lr for glob, lr in (train.lr_of or {}).items() for name in select(model, glob, "train.lr_of")}
    settings = train.optimizer
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    hidden = _hidden_matrices(model) if settings.name == "muon" else set()
    own = _group_settings(settings.groups or [], named)
    groups: dict[tuple[float, float, bool], list[nn.Parameter]] = {}
    for name, parameter in named.items():
        decayed = _is_matrix(name, parameter) and id(parameter) not in embeddings
        decay = own[name].get("weight_decay", train.weight_decay if decayed else 0.0)
        lr = own[name].get("lr", lr_of.get(name, train.peak_lr))
        groups.setdefault((lr / train.peak_lr, decay, id(parameter) in hidden), []).append(parameter)
    options: dict[str, Any] = {"betas": (settings.beta1, settings.beta2), "eps": settings.eps}
    if settings.name == "muon":
        options |= {
            "momentum": settings.momentum,
            "nesterov": settings.nesterov,
            "ns_steps": settings.ns_steps,
            "lr_scale": settings.muon_lr_scale,
        }
    return optimizer_class(settings.name, model)(
        [
            {"params": members, "weight_decay": decay, "lr_scale": scale} | ({"use_muon": True} if muon else {})
            for (scale, decay, muon), members in sorted(groups.items(), key=lambda item: item[0], reverse=True)
        ],
        lr=train.peak_lr,
        **options,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of each group to `lr` times its "lr_scale"."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(lr * group["lr_scale"])
        else:
            group["lr"] = lr * group["lr_scale"]


def require_same_optimizer(checkpoint: Path, saved: Mapping[str, Any], optimizer: OptimizerConfig) -> None:
    """Raise where `checkpoint`, of a run with the configuration `saved`, has the state of another optimizer."""
    name = saved.get("train", {}).get("optimizer", {}).get("name", "adamw")
    alike = {"adamw", "adamw_torch"}
    if name != optimizer.name and not {name, optimizer.name} <= alike:
        raise ConfigError(
            f"{checkpoint} was saved with train.optimizer.name={name}, whose state {optimizer.name} cannot continue",
            hint=f"set train.optimizer.name: {name}, or start a new run from its weights with model.model_path",
        )


def _hidden_matrices(model: nn.Module) -> set[int]:
    """Ids of the matrices of hidden layers and of stacks of them: not embeddings, heads (with their adapters) or
    convolutions."""
    outside = [head for module in model.modules() if (head := head_of(module)) is not None]
    outside += [model.get_submodule(name) for name in classifier_heads(model)]
    outside += [m for m in model.modules() if isinstance(getattr(m, "base_layer", m), nn.Embedding)]
    excluded = {id(p) for module in outside for p in module.parameters()}
    convolutions = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    excluded |= {id(p) for m in model.modules() if isinstance(m, convolutions) for p in m.parameters()}
    named = model.named_parameters()
    return {id(p) for name, p in named if p.ndim in (2, 3) and _is_matrix(name, p) and id(p) not in excluded}


def _is_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Whether a parameter is a matrix, a stack of them or a kernel of a convolution.

    Biases of stacked experts have two dims too, as have decay rates and skip weights of state-space layers: one for
    each channel and state, or each head.
    """
    own = name.rpartition(".")[2]
    is_vector = parameter.ndim < 2 or (parameter.ndim > 2 and parameter.numel() == max(parameter.shape))
    return not (is_vector or own.endswith("bias") or own in ("A_log", "D"))


def _group_settings(
    groups: list[dict[str, Any]], named: Mapping[str, nn.Parameter]
) -> defaultdict[str, dict[str, float]]:
    """What `train.optimizer.groups` sets, by parameter."""
    found: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for number, group in enumerate(groups):
        globs = [group["params"]] if isinstance(group["params"], str) else group["params"]
        for glob in globs:
            names = fnmatch.filter(named, glob)
            if not names:
                raise ConfigError(
                    f"train.optimizer.groups[{number}]: {glob!r} matches no trainable parameter",
                    hint=f"names are such as {next(iter(named))}; * matches any characters",
                )
            for name in names:
                found[name] |= {key: value for key, value in group.items() if key != "params"}
    return found


def learning_rate(train: TrainConfig, step: int, max_steps: float) -> float:
    """Learning rate of step `step` (the first is 1) of `max_steps`.

    It rises linearly to `lr` at `warmup_steps`, then follows the scheduler down to `lr * min_lr_ratio`, which it would
    reach one step after the last.
    """
    warmup = train.warmup_steps if train.warmup_steps >= 1 else train.warmup_steps * max_steps
    if step <= warmup:
        return train.peak_lr * step / warmup
    after_warmup = max_steps + 1 - warmup
    done = (step - warmup) / after_warmup
    # Where the warmup reaches into the last part, the decay starts from the peak all the same.
    decay_steps = min(train.optimizer.decay_ratio * max_steps, after_warmup)
    height = {
        "constant": 1.0,
        "linear": 1 - done,
        "cosine": 0.5 * (1 + math.cos(math.pi * done)),
        "warmup_stable_decay": min(1.0, (max_steps + 1 - step) / decay_steps),
    }[train.lr_scheduler]
    lowest = train.optimizer.min_lr_ratio
    return train.peak_lr * (lowest + (1 - lowest) * height)
