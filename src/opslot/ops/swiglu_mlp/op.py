"""SwiGLU's activation (Shazeer 2020, equation 6): contract, references and costs.

The slot is between the projections of an MLP, so projections keep their forward, and LoRA, FP8 and tensor parallelism
work as in Transformers.

Shapes: `gate` and `up` [..., I] with any strides; `gate_up` [..., 2 I], gate first. Returns [..., I].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from opslot.ops.swiglu_mlp.cases import (
    CASES,
    CLAMPED_CASES,
    FUSED_CASES,
    benchmark_case,
    clamped_benchmark_case,
    fused_benchmark_case,
)
from opslot.slots import Cost, KernelRequest, OpSpec, OpVariant


def standard(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, in the dtype that torch promotes them to."""
    return nn.functional.silu(gate) * up


def fused_gate_up(gate_up: Tensor) -> Tensor:
    """silu(first half) * second half of one projection's output."""
    gate, up = gate_up.chunk(2, dim=-1)
    return nn.functional.silu(gate) * up


def clamped(gate: Tensor, up: Tensor, limit: float, alpha: float = 1.0, up_offset: float = 0.0) -> Tensor:
    """(u + up_offset) * g * sigmoid(alpha * g), g = min(gate, limit), u = up within -limit..limit.

    Clamped values get no gradient. DeepSeek-V4 and GLM-5 use the defaults, gpt-oss and MiniMax-M3 alpha 1.702 and
    up_offset 1. Returns the dtype that torch promotes `gate` and `up` to.
    """
    gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    activated = nn.functional.silu(gate) if alpha == 1.0 else gate * torch.sigmoid(gate * alpha)
    return activated * (up + up_offset if up_offset else up)


# By name, because Transformers has another class than torch, and ops do not import Transformers.
_SILU_CLASSES = ("SiLU", "SiLUActivation")
_ACTIVATION_ATTRIBUTES = ("act_fn", "activation_fn", "act")


def _needs_silu(module: Any) -> str | None:
    for name in _ACTIVATION_ATTRIBUTES:
        activation = getattr(module, name, None)
        if activation is None:
            continue
        found = activation.__name__ if hasattr(activation, "__name__") else type(activation).__name__
        return None if found in (*_SILU_CLASSES, "silu") else f"its {name} is {found}, not SiLU"
    return f"its activation is unknown: {type(module).__name__} has none of {', '.join(_ACTIVATION_ATTRIBUTES)}"


def _silu_if_named(module: Any) -> str | None:
    """`clamped` is also written out without an activation module; if there is one, it must be SiLU."""
    named = any(getattr(module, name, None) is not None for name in _ACTIVATION_ATTRIBUTES)
    return _needs_silu(module) if named else None


def _static_shape(request: KernelRequest) -> Mapping[str, int] | None:
    down = getattr(request.module, "down_proj", None)
    width = getattr(down, "in_features", None)
    return None if width is None else {"width": width}


def _cost(arguments: Mapping[str, Any]) -> Cost:
    """Forward reads gate and up and writes out; backward reads them and dout and writes two gradients."""
    tensors = [x for x in arguments.values() if isinstance(x, Tensor)]
    size = sum(x.numel() * x.element_size() for x in tensors)
    return Cost(bytes=4 * size)


_VARIANTS = (
    OpVariant(
        "standard",
        standard,
        CASES,
        ("gate", "up"),
        _cost,
        check_module=_needs_silu,
        static_shape=_static_shape,
        benchmark_case=benchmark_case,
        description="silu(gate) * up",
    ),
    OpVariant(
        "fused_gate_up",
        fused_gate_up,
        FUSED_CASES,
        ("gate_up",),
        _cost,
        check_module=_needs_silu,
        static_shape=_static_shape,
        benchmark_case=fused_benchmark_case,
        description="silu(first half) * second half",
    ),
    OpVariant(
        "clamped",
        clamped,
        CLAMPED_CASES,
        ("gate", "up"),
        _cost,
        check_module=_silu_if_named,
        static_shape=_static_shape,
        benchmark_case=clamped_benchmark_case,
        description="gate and up within a limit",
    ),
)

OP = OpSpec(
    name="swiglu_mlp",
    description="SwiGLU activation between an MLP's projections",
    variants={variant.name: variant for variant in _VARIANTS},
)
