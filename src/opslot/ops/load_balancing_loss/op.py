"""Load-balancing loss of a mixture of experts: contract, reference and cost.

Switch Transformer (Fedus et al. 2021), equations 4 to 6, over all layers at once: with f_e the share of (row, choice)
pairs that chose expert e times the top-k, and P_e the mean router probability of e, both over the rows of all layers,
the loss is E * sum(f_e * P_e). Choices carry no gradient.

Shapes: `gate_logits` is a tuple of [T, E], one per layer; `attention_mask` [B, S] with B * S = T.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from opslot.ops._common.arguments import reject
from opslot.ops._common.model_config import text_config
from opslot.ops.load_balancing_loss.cases import CASES, benchmark_case
from opslot.slots import Cost, KernelRequest, OpSpec, OpVariant


def standard(
    gate_logits: tuple[Tensor, ...] | None,
    num_experts: int | None = None,
    top_k: int = 2,
    attention_mask: Tensor | None = None,
) -> Tensor | int:
    """The loss as Transformers defines it from 5.16 on; earlier releases differ only by rounding.

    Among experts of equal probability in a row, any choice of the top-k is right: which one is taken may differ
    between devices, releases and kernels, and the loss with it.

    Args:
        gate_logits: router logits of each layer, before the softmax; anything but a tuple (a dense model's None)
            gives 0.
        num_experts: E.
        top_k: experts chosen per row.
        attention_mask: weight of each row, the same for every layer: 1 counts, 0 is padding.

    Returns:
        A scalar, float32 or float64, or the integer 0.

    Raises:
        KernelError: logits without `num_experts`.
    """
    if gate_logits is None or not isinstance(gate_logits, tuple):
        return 0
    if num_experts is None:
        reject("load_balancing_loss", "num_experts", "None beside gate_logits", "pass the number of experts")
    device = gate_logits[0].device
    dtype = torch.promote_types(gate_logits[0].dtype, torch.float32)
    rows = torch.zeros((), dtype=dtype, device=device)
    chosen = torch.zeros(num_experts, dtype=dtype, device=device)
    probability = torch.zeros(num_experts, dtype=dtype, device=device)
    mask = None if attention_mask is None else attention_mask.reshape(-1, 1).to(device=device, dtype=dtype)
    for logits in gate_logits:
        weights = logits.to(device).softmax(dim=-1)
        _, experts = weights.topk(top_k, dim=-1)
        choice = torch.zeros_like(weights, dtype=dtype).scatter(1, experts, 1.0)
        share = weights.to(dtype)
        if mask is not None:
            choice, share = choice * mask, share * mask
        chosen = chosen + choice.sum(0)
        probability = probability + share.sum(0)
        rows = rows + (weights.shape[0] if mask is None else mask.sum())
    return (chosen / rows * (probability / rows)).sum() * num_experts


def _static_shape(request: KernelRequest) -> Mapping[str, int] | None:
    config = text_config(request)
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    top_k = getattr(config, "num_experts_per_tok", None)
    if experts is None or top_k is None:
        return None
    return {"layers": config.num_hidden_layers, "experts": experts, "top_k": top_k}


def _cost(arguments: Mapping[str, Any]) -> Cost:
    """Reads the logits in forward and backward, and writes their gradients."""
    return Cost(bytes=3 * sum(x.numel() * x.element_size() for x in arguments["gate_logits"]))


OP = OpSpec(
    name="load_balancing_loss",
    description="auxiliary loss that balances tokens over experts",
    variants={
        "standard": OpVariant(
            "standard",
            standard,
            CASES,
            ("gate_logits",),
            _cost,
            static_shape=_static_shape,
            benchmark_case=benchmark_case,
            description="all layers at once",
        )
    },
)
