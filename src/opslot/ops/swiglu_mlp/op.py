"""The activation of a gated MLP (Shazeer 2020, equations 5 and 6): contract, references and costs.

The slot is between the projections of an MLP, so projections keep their forward, and LoRA, FP8 and tensor parallelism
work as in Transformers.

Shapes: `gate` and `up` [..., I] with any strides; `gate_up` [..., 2 I], gate first. Returns [..., I]. `activation` is a
name in `ACTIVATIONS`, or a module or function that computes one of them: SwiGLU with "silu", GeGLU with "gelu_tanh".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from opslot.ops._common.activations import Activation, activate, activation_in, activation_name, activation_problem
from opslot.ops._common.model_config import activation_width
from opslot.ops.swiglu_mlp.cases import (
    CASES,
    CLAMPED_CASES,
    FUSED_CASES,
    benchmark_case,
    clamped_benchmark_case,
    fused_benchmark_case,
)
from opslot.patchgen.forms import ACTIVATION_ATTRIBUTES
from opslot.slots import Cost, InputCase, KernelRequest, OpSpec, OpVariant


def standard(gate: Tensor, up: Tensor, activation: Activation = "silu") -> Tensor:
    """activation(gate) * up, in the dtype that torch promotes them to."""
    return activate(activation, gate) * up


def fused_gate_up(gate_up: Tensor, activation: Activation = "silu") -> Tensor:
    """activation(first half) * second half of one projection's output."""
    gate, up = gate_up.chunk(2, dim=-1)
    return activate(activation, gate) * up


def clamped(gate: Tensor, up: Tensor, limit: float, alpha: float = 1.0, up_offset: float = 0.0) -> Tensor:
    """(u + up_offset) * g * sigmoid(alpha * g), g = min(gate, limit), u = up within -limit..limit.

    Clamped values get no gradient. DeepSeek-V4 and GLM-5 use the defaults, gpt-oss and MiniMax-M3 alpha 1.702 and
    up_offset 1. Returns the dtype that torch promotes `gate` and `up` to.
    """
    gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    activated = nn.functional.silu(gate) if alpha == 1.0 else gate * torch.sigmoid(gate * alpha)
    return activated * (up + up_offset if up_offset else up)


def _check_activation(module: Any) -> str | None:
    activation = activation_in(module)
    if activation is None:
        return f"its activation is unknown: {type(module).__name__} has none of {', '.join(ACTIVATION_ATTRIBUTES)}"
    return activation_problem(activation)


def _silu_if_named(module: Any) -> str | None:
    """`clamped` is also written out without an activation module; if there is one, it must be SiLU."""
    activation = activation_in(module)
    if activation is None or activation_name(activation) == "silu":
        return None
    return f"its activation is {type(activation).__name__}, not SiLU"


def activation_of(request: KernelRequest) -> str | None:
    """The name of the activation of the MLP that a kernel is requested for; "silu" without a module."""
    return "silu" if request.module is None else activation_name(activation_in(request.module))


def static_shape(request: KernelRequest) -> Mapping[str, int] | None:
    """The width of the MLP that a kernel is requested for; None if it is unknown."""
    return activation_width(request, "down_proj", "output_linear", "Wo", "wo", "fc2")


def _cost(arguments: Mapping[str, Any]) -> Cost:
    """Forward reads gate and up and writes out; backward reads them and dout and writes two gradients."""
    tensors = [x for x in arguments.values() if isinstance(x, Tensor)]
    size = sum(x.numel() * x.element_size() for x in tensors)
    return Cost(bytes=4 * size)


def _variant(
    reference: Callable[..., Tensor],
    cases: list[InputCase],
    benchmark_case: Callable[..., InputCase],
    description: str,
    check: Callable[[Any], str | None] = _check_activation,
) -> OpVariant:
    """A variant named after its reference."""
    return OpVariant(
        reference.__name__,
        reference,
        cases,
        ("gate_up",) if reference is fused_gate_up else ("gate", "up"),
        _cost,
        check_module=check,
        static_shape=static_shape,
        benchmark_case=benchmark_case,
        description=description,
    )


_VARIANTS = (
    _variant(standard, CASES, benchmark_case, "activation(gate) * up"),
    _variant(fused_gate_up, FUSED_CASES, fused_benchmark_case, "activation(first half) * second half"),
    _variant(clamped, CLAMPED_CASES, clamped_benchmark_case, "gate and up within a limit", _silu_if_named),
)

OP = OpSpec(
    name="swiglu_mlp",
    description="activation(gate) * up between an MLP's projections: SwiGLU, GeGLU and others",
    variants={variant.name: variant for variant in _VARIANTS},
)
