"""Depthwise causal convolution: contract, reference, cases, cost.

Shapes: `hidden_states` [B, D, S], `weight` [D, W], `bias` [D]; out[t] sums weight[j] * x[t - W + 1 + j]. `cu_seqlens`
    (int32 or int64,
[documents + 1], B = 1) keeps the window of a document's first tokens from reaching into the document before it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from opslot._base.errors import KernelError
from opslot.ops._common.cases import randn
from opslot.slots import Cost, InputCase, OpSpec, OpVariant

_ACTIVATIONS = {None: lambda x: x, "silu": nn.functional.silu, "swish": nn.functional.silu}


def reference(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Convolve each channel with its own causal filter, then apply `activation` (None, "silu" or "swish").

    Returns [B, D, S] in the input's dtype.
    """
    if activation not in _ACTIVATIONS:
        raise KernelError(f"causal_conv1d: activation {activation!r} is not served; use None or 'silu'")
    spans = [(0, hidden_states.shape[-1])]
    if cu_seqlens is not None:
        bounds = cu_seqlens.tolist()
        spans = list(itertools.pairwise(bounds))
    parts = [_convolve(hidden_states[..., a:b], weight, bias) for a, b in spans if b > a]
    return _ACTIVATIONS[activation](torch.cat(parts, -1)).to(hidden_states.dtype)


def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    channels, width = weight.shape
    padded = nn.functional.pad(x.to(weight.dtype), (width - 1, 0))
    return nn.functional.conv1d(padded, weight.unsqueeze(1), bias, groups=channels)


def _case(
    name: str, shape: tuple[int, int, int, int], documents: list[int] | None = None, role: str = "check"
) -> InputCase:
    batch, channels, length, width = shape

    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        arguments: dict[str, Any] = {
            # [B, S, D] in memory, as the projection before it leaves it.
            "hidden_states": randn((batch, length, channels), dtype, device, generator).transpose(1, 2),
            "weight": randn((channels, width), dtype, device, generator, 0.5),
            "activation": "silu",
        }
        if documents is not None:
            arguments["cu_seqlens"] = torch.tensor([0, *documents], device=device).cumsum(0).to(torch.int32)
        return arguments

    return InputCase(name, make, role)


def _cost(arguments: Mapping[str, Any]) -> Cost:
    x = arguments["hidden_states"]
    return Cost(bytes=5 * x.numel() * x.element_size())


OP = OpSpec(
    name="causal_conv1d",
    description="depthwise causal convolution before a gated delta rule",
    variants={
        "standard": OpVariant(
            "standard",
            reference,
            [
                _case("two rows", (2, 64, 33, 4)),
                _case("packed documents", (1, 96, 40, 4), documents=[2, 1, 30, 7]),
                _case("8192x8192", (1, 8192, 8192, 4), role="bench"),
            ],
            ("hidden_states", "weight"),
            _cost,
        )
    },
)
