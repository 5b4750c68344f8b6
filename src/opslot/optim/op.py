"""AdamW (Loshchilov and Hutter 2019, algorithm 2): contract, reference, cost.

One tensor, one step. `param`, `grad`, `exp_avg`, `exp_avg_sq` have one shape; `step` is a float32 scalar tensor that
counts from 1. An implementation may update its arguments in place and return them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from opslot.optim.cases import CASES
from opslot.slots import Cost, OpSpec, OpVariant


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
    dtype = torch.promote_types(param.dtype, torch.float32)
    p, g, m, v = (x.to(dtype) for x in (param, grad, exp_avg, exp_avg_sq))
    count = step.to(dtype)
    m = m + (g - m) * (1 - beta1)
    v = v * beta2 + g * g * (1 - beta2)
    denominator = (v / (1 - beta2**count)).sqrt() + eps
    p = p * (1 - lr * weight_decay) - lr * (m / (1 - beta1**count)) / denominator
    return p.to(param.dtype), m.to(exp_avg.dtype), v.to(exp_avg_sq.dtype)


def _cost(arguments: Mapping[str, Any]) -> Cost:
    """Reads four tensors and writes three."""
    return Cost(bytes=7 * arguments["param"].numel() * arguments["param"].element_size())


OP = OpSpec(
    name="adamw",
    description="the optimizer's step; chosen by the trainer, not bound to a model",
    bound_to_model=False,
    variants={
        "standard": OpVariant(
            "standard",
            reference,
            CASES,
            (),
            _cost,
        )
    },
)
