"""Keys and values of multi-head latent attention (DeepSeek-V2, section 2.1): contract, reference and cost.

The up-projection of the compressed keys and values gives each head its keys without positions and its values. All heads
share the part of the keys that has positions.

Shapes: `kv` [B, heads, S, nope + v] with any strides, `k_rot` [B, 1, S, rope]. Returns keys [B, heads, S, nope + rope]
in the promoted dtype of both, and values [B, heads, S, v], a view of `kv`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from opslot.ops._common.model_config import latent_head_sizes
from opslot.ops.expand_kv.cases import CASES, benchmark_case
from opslot.slots import Cost, OpSpec, OpVariant


def standard(kv: Tensor, k_rot: Tensor, qk_nope_head_dim: int) -> tuple[Tensor, Tensor]:
    """`k_rot` after the first `qk_nope_head_dim` channels of each head, and the other channels."""
    k_nope, value = kv.tensor_split((qk_nope_head_dim,), -1)
    return torch.cat((k_nope, k_rot.expand(-1, kv.shape[1], -1, -1)), -1), value


def _cost(arguments: Mapping[str, Any]) -> Cost:
    """Forward reads the keys without positions and writes keys; backward reads both gradients and writes that of kv."""
    kv, k_rot, nope = arguments["kv"], arguments["k_rot"], arguments["qk_nope_head_dim"]
    channels = 2 * (nope + k_rot.shape[-1]) + 2 * kv.shape[-1]
    rows = kv.numel() // kv.shape[-1]
    return Cost(bytes=rows * channels * kv.element_size() + 2 * k_rot.numel() * k_rot.element_size())


OP = OpSpec(
    name="expand_kv",
    description="keys and values of multi-head latent attention",
    variants={
        "standard": OpVariant(
            "standard",
            standard,
            CASES,
            ("kv", "k_rot"),
            _cost,
            static_shape=latent_head_sizes,
            benchmark_case=benchmark_case,
            description="keys with the part that all heads share, and one tensor of the gradients of keys and values",
        )
    },
)
