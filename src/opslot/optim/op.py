"""AdamW (Loshchilov and Hutter 2019, algorithm 2): contract, reference, cases, cost.

One tensor, one step. `param`, `grad`, `exp_avg`, `exp_avg_sq` have one shape; `step` is a float32 scalar tensor that
counts from 1. An implementation may update its arguments in place and return them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from opslot.slots import Cost, InputCase, OpSpec, OpVariant
from opslot.slots.random_inputs import randn


def reference(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The new (param, exp_avg, exp_avg_sq), computed in fp32 (fp64 for fp64 input) and rounded once to their dtypes."""
    wide = torch.promote_types(param.dtype, torch.float32)
    p, g, m, v = (x.to(wide) for x in (param, grad, exp_avg, exp_avg_sq))
    count = step.to(wide)
    m = m + (g - m) * (1 - beta1)
    v = v * beta2 + g * g * (1 - beta2)
    denominator = (v / (1 - beta2**count)).sqrt() + eps
    p = p * (1 - lr * weight_decay) - lr * (m / (1 - beta1**count)) / denominator
    return p.to(param.dtype), m.to(exp_avg.dtype), v.to(exp_avg_sq.dtype)


def _case(name: str, shape: tuple[int, ...], step: int, role: str = "check") -> InputCase:
    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        def draw(scale: float) -> Tensor:
            return randn(shape, dtype, device, generator, scale)

        return {
            "param": draw(0.1),
            "grad": draw(0.01),
            "exp_avg": draw(0.01),
            "exp_avg_sq": draw(0.01).square(),
            "step": torch.tensor(float(step), device=device),
            "lr": 1e-2,
            "beta1": 0.9,
            "beta2": 0.95,
            "eps": 1e-8,
            "weight_decay": 0.1,
        }

    return InputCase(name, make, role)


def _cost(arguments: Mapping[str, Any]) -> Cost:
    """Four tensors in, three out."""
    return Cost(bytes=7 * arguments["param"].numel() * arguments["param"].element_size())


OP = OpSpec(
    name="adamw",
    description="the optimizer's step; chosen by the trainer, not bound to a model",
    bound_to_model=False,
    variants={
        "standard": OpVariant(
            "standard",
            reference,
            [
                _case("first step", (33, 65), 1),
                _case("later step", (7, 1025), 1000),
                _case("one element", (1,), 3),
                _case("128x1536x2048", (128, 1536, 2048), 10, role="bench"),
            ],
            (),
            _cost,
        )
    },
)
