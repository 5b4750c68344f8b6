"""Taking q, k and v out of the output of one projection: contract, reference and cost.

Forward only makes views. Backward gathers three gradients in one tensor, for which autograd stacks and copies them.

Shapes: `qkv` [S, 3, heads, D] or [B, S, 3, heads, D] with any strides, or in the variant `sliced` [(B,) S, channels].
Returns q, k and v [(B,) S, heads, D], views.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from opslot.ops._common.model_config import sizes_of
from opslot.ops.unbind_qkv.cases import CASES, SLICED_CASES, benchmark_case, sliced_benchmark_case
from opslot.slots import Cost, KernelRequest, OpSpec, OpVariant


def standard(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The slices of the third dimension from the end, as Transformers' towers take them."""
    q, k, v = qkv.movedim(-3, 0).unbind(0)
    return q, k, v


def sliced(qkv: Tensor, query_end: int, key_end: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Slices of the last dimension, of which those of queries and of keys end at the given channels, as heads."""
    q, k, v = (x.unflatten(-1, (-1, head_dim)) for x in qkv.tensor_split((query_end, key_end), -1))
    return q, k, v


def _grouped_shape(request: KernelRequest) -> Mapping[str, int] | None:
    heads = sizes_of(request.config, heads="num_attention_heads")
    others = sizes_of(request.module, num_key_value_heads="num_key_value_heads", head_dim="head_dim")
    return None if heads is None or others is None else heads | others


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
            static_shape=lambda request: sizes_of(request.module, heads="num_heads", head_dim="head_dim"),
            benchmark_case=benchmark_case,
            description="views, and one tensor of their gradients",
        ),
        "sliced": OpVariant(
            "sliced",
            sliced,
            SLICED_CASES,
            ("qkv",),
            _cost,
            static_shape=_grouped_shape,
            benchmark_case=sliced_benchmark_case,
            description="slices of one projection with fewer heads of k and v, and one tensor of their gradients",
        ),
    },
)
