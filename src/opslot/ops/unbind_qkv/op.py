"""Taking q, k and v out of the output of one projection: contract, reference and cost.

Forward only makes views. Backward gathers three gradients in one tensor, for which autograd stacks and copies them.

Shapes: `qkv` [S, 3, heads, D] or [B, S, 3, heads, D] with any strides. Returns q, k and v [(B,) S, heads, D], views.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from opslot.ops.unbind_qkv.cases import CASES, benchmark_case
from opslot.slots import Cost, KernelRequest, OpSpec, OpVariant


def standard(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The slices of the third dimension from the end, as Transformers' towers take them."""
    q, k, v = qkv.movedim(-3, 0).unbind(0)
    return q, k, v


def _static_shape(request: KernelRequest) -> Mapping[str, int] | None:
    heads, width = (getattr(request.module, name, None) for name in ("num_heads", "head_dim"))
    return {"heads": heads, "head_dim": width} if isinstance(heads, int) and isinstance(width, int) else None


def _cost(arguments: Mapping[str, Any]) -> Cost:
    """Backward reads three gradients and writes them."""
    qkv = arguments["qkv"]
    return Cost(bytes=2 * qkv.numel() * qkv.element_size())


OP = OpSpec(
    name="unbind_qkv",
    description="q, k and v from the output of one projection",
    variants={
        "standard": OpVariant(
            "standard",
            standard,
            CASES,
            ("qkv",),
            _cost,
            static_shape=_static_shape,
            benchmark_case=benchmark_case,
            description="views, and one tensor of their gradients",
        )
    },
)
