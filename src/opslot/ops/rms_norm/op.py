"""RMSNorm (Zhang and Sennrich 2019, equation 4): contract, references, input cases and costs.

Shapes: `hidden_states` [..., H] with any strides, `weight` [H], `gate` like `hidden_states`; statistics in float32 (float64 for
float64 input); `eps` is added to the mean of squares.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from opslot.ops._common.cases import randn
from opslot.slots import Cost, InputCase, OpSpec, OpVariant


def _normalize(hidden_states: Tensor, eps: float) -> Tensor:
    x = hidden_states.to(torch.promote_types(hidden_states.dtype, torch.float32))
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def standard(hidden_states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Llama's form: normalize in fp32, cast to the input's dtype, multiply by `weight`.

    Returns [..., H] in the dtype that torch promotes `weight` and `hidden_states` to.
    """
    return weight * _normalize(hidden_states, eps).to(hidden_states.dtype)


def offset(hidden_states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Gemma's and Qwen3.5's form: multiply by (1 + weight) in fp32, cast last. Returns the input's dtype."""
    normalized = _normalize(hidden_states, eps)
    return (normalized * (1.0 + weight.to(normalized.dtype))).to(hidden_states.dtype)


def gated(hidden_states: Tensor, weight: Tensor, eps: float, gate: Tensor) -> Tensor:
    """The gated delta rule's output norm: standard, then times silu(gate) in fp32. Returns the input's dtype."""
    normalized = standard(hidden_states, weight, eps)
    wide = torch.promote_types(gate.dtype, torch.float32)
    return (normalized * nn.functional.silu(gate.to(wide))).to(hidden_states.dtype)


def unweighted(hidden_states: Tensor, eps: float) -> Tensor:
    """No weight at all. Returns the input's dtype."""
    return _normalize(hidden_states, eps).to(hidden_states.dtype)


_SHAPES = {
    "model width": (2, 33, 256),
    "head width": (3, 5, 7, 128),
    "odd width": (6, 42, 123),
    "one row": (1, 64),
    "no rows": (0, 64),
}


def _case(name: str, shape: tuple[int, ...], role: str = "check", strided: bool = False, **extra: str) -> InputCase:
    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        width = shape[-1]
        x = randn((*shape[:-1], width * (2 if strided else 1)), dtype, device, generator)
        arguments: dict[str, Any] = {"hidden_states": x[..., :width], "eps": 1e-6}
        if "weight" in extra:
            arguments["weight"] = randn((width,), dtype, device, generator) * 0.2 + 1.0
        if "gate" in extra:
            arguments["gate"] = randn(shape, dtype, device, generator)
        return arguments

    return InputCase(name, make, role)


def _cases(**extra: str) -> list[InputCase]:
    return [
        *(_case(name, shape, **extra) for name, shape in _SHAPES.items()),
        _case("strided view", (4, 9, 96), strided=True, **extra),
        _case("16384x4096", (16384, 4096), role="bench", **extra),
        _case("16384x2048", (16384, 2048), role="bench", **extra),
        _case("524288x128", (524288, 128), role="bench", **extra),
    ]


def _cost(arguments: Mapping[str, Any]) -> Cost:
    """x in and y out forward; x and dy in and dx out backward; a gate doubles its share."""
    x = arguments["hidden_states"]
    passes = 5 + (3 if "gate" in arguments else 0)
    return Cost(bytes=passes * x.numel() * x.element_size())


OP = OpSpec(
    name="rms_norm",
    description="root mean square layer norm",
    variants={
        v.name: v
        for v in (
            OpVariant(
                "standard", standard, _cases(weight="yes"), ("hidden_states", "weight"), _cost, description="cast, then times weight"
            ),
            OpVariant("offset", offset, _cases(weight="yes"), ("hidden_states", "weight"), _cost, description="times (1 + weight) in fp32"),
            OpVariant(
                "gated",
                gated,
                _cases(weight="yes", gate="yes"),
                ("hidden_states", "weight", "gate"),
                _cost,
                config_field="rms_norm_gated_implementation",
                description="standard, then times silu(gate)",
            ),
            OpVariant("unweighted", unweighted, _cases(), ("hidden_states",), _cost, description="no weight"),
        )
    },
)
