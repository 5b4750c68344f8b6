"""A linear layer computed in float32, as MoE routers are: contract, reference and cost.

Shapes: `x` [..., in_features], `weight` [out_features, in_features]; returns [..., out_features] in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from opslot.ops.linear_fp32.cases import CASES, benchmark_case
from opslot.slots import Cost, KernelRequest, OpSpec, OpVariant


def standard(x: Tensor, weight: Tensor) -> Tensor:
    """`F.linear(x.float(), weight.float())`; in float64 for float64 input."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return F.linear(x.to(dtype), weight.to(dtype))


def _static_shape(request: KernelRequest) -> Mapping[str, int] | None:
    weight = getattr(request.module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        return None
    return {"out_features": weight.shape[0], "in_features": weight.shape[1]}


def _cost(arguments: Mapping[str, Any]) -> Cost:
    """Forward reads `x` and `weight`; backward reads both and the gradient of the output, and writes two gradients."""
    x, weight = arguments["x"], arguments["weight"]
    outputs = x.numel() // max(x.shape[-1], 1) * weight.shape[0]
    return Cost(
        bytes=3 * (x.numel() + weight.numel()) * x.element_size() + 8 * outputs, flops=6 * outputs * x.shape[-1]
    )


OP = OpSpec(
    name="linear_fp32",
    description="linear layer of 16-bit hidden states in float32, as MoE routers",
    variants={
        "standard": OpVariant(
            "standard",
            standard,
            CASES,
            ("x", "weight"),
            _cost,
            static_shape=_static_shape,
            benchmark_case=benchmark_case,
            description="hidden states and weight of one dtype, results in float32",
        )
    },
)
