"""SwiGLU's activation (Shazeer 2020, equation 6): contract, references, input cases and costs.

The slot stands between an MLP's projections, so every projection keeps its own forward: LoRA, FP8 and tensor
parallelism see what they see upstream.

Shapes: `gate` and `up` [..., I] with any strides; `gate_up` [..., 2 I], gate first. Returns [..., I].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from opslot.slots import Cost, InputCase, KernelRequest, OpSpec, OpVariant
from opslot.slots.random_inputs import randn


def standard(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, in the dtype that torch promotes them to."""
    return nn.functional.silu(gate) * up


def fused_gate_up(gate_up: Tensor) -> Tensor:
    """silu(first half) * second half of one projection's output."""
    gate, up = gate_up.chunk(2, dim=-1)
    return nn.functional.silu(gate) * up


def clamped(gate: Tensor, up: Tensor, limit: float, alpha: float = 1.0, up_offset: float = 0.0) -> Tensor:
    """(u + up_offset) * g * sigmoid(alpha * g), g = min(gate, limit), u = up within -limit..limit.

    No gradient passes a bound. DeepSeek-V4 and GLM-5 use the defaults, gpt-oss and MiniMax-M3 alpha 1.702 and up_offset
    1. Returns the dtype that torch promotes `gate` and `up` to.
    """
    gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    activated = nn.functional.silu(gate) if alpha == 1.0 else gate * torch.sigmoid(gate * alpha)
    return activated * (up + up_offset if up_offset else up)


# By name: Transformers' own class is an nn.Module beside torch's, and ops import no Transformers.
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
    """`clamped` is also written out without an activation module; one that is there has to be SiLU."""
    named = any(getattr(module, name, None) is not None for name in _ACTIVATION_ATTRIBUTES)
    return _needs_silu(module) if named else None


def _case(
    name: str,
    shape: tuple[int, ...],
    *,
    fused: bool = False,
    form: Mapping[str, float] | None = None,
    role: str = "check",
    view: str = "",
    scale: float = 1.0,
) -> InputCase:
    """`form` holds the numbers that `clamped` takes beside its tensors."""

    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        *lead, width = shape

        def tensor(columns: int) -> Tensor:
            if view == "columns":
                return randn((*lead, columns + 8), dtype, device, generator, scale)[..., 8:]
            if view == "transposed":
                return randn((lead[1], lead[0], *lead[2:], columns), dtype, device, generator, scale).transpose(0, 1)
            return randn((*lead, columns), dtype, device, generator, scale)

        if fused:
            return {"gate_up": tensor(2 * width)}
        if view == "halves":
            gate, up = tensor(2 * width).chunk(2, dim=-1)
            return {"gate": gate, "up": up, **(form or {})}
        return {"gate": tensor(width), "up": tensor(width), **(form or {})}

    return InputCase(name, make, role, {"width": shape[-1]})


# Limits that bf16 and fp16 hold exactly, low enough for a good part of normal numbers to meet them.
_BOUNDED = {"limit": 1.5}
_BOUNDED_WITH_OFFSET = {"limit": 1.25, "alpha": 1.702, "up_offset": 1.0}


def _cases(fused: bool = False, form: Mapping[str, float] | None = None) -> list[InputCase]:
    def case(name: str, shape: tuple[int, ...], **options: Any) -> InputCase:
        return _case(name, shape, fused=fused, form=form, **options)

    cases = [
        case("model width", (2, 33, 256)),
        case("odd width", (3, 7, 123)),
        case("one row", (1, 40)),
        case("width one", (5, 1)),
        case("no rows", (0, 64)),
        case("column slice", (4, 9, 96), view="columns"),
        case("transposed rows", (4, 9, 96), view="transposed"),
        case("saturated", (3, 80), scale=20.0),
        case("16384x12288", (16384, 12288), role="bench"),
        case("16384x768", (16384, 768), role="bench"),
    ]
    if not fused:
        cases.insert(5, case("halves of one projection", (4, 5, 64), view="halves"))
    return cases


def _site_shape(request: KernelRequest) -> Mapping[str, int] | None:
    down = getattr(request.module, "down_proj", None)
    width = getattr(down, "in_features", None)
    return None if width is None else {"width": width}


def _case_at(
    fused: bool = False, form: Mapping[str, float] | None = None
) -> Callable[[Mapping[str, int], int], InputCase]:
    def benchmark_case(shape: Mapping[str, int], tokens: int) -> InputCase:
        width = shape["width"]
        return _case(f"{tokens}x{width}", (tokens, width), fused=fused, form=form, role="bench")

    return benchmark_case


def _cost(arguments: Mapping[str, Any]) -> Cost:
    """Forward reads gate and up and writes out; backward reads them and dout and writes two gradients."""
    tensors = [x for x in arguments.values() if isinstance(x, Tensor)]
    size = sum(x.numel() * x.element_size() for x in tensors)
    return Cost(bytes=4 * size)


_VARIANTS = (
    OpVariant(
        "standard",
        standard,
        _cases(),
        ("gate", "up"),
        _cost,
        check_module=_needs_silu,
        static_shape=_site_shape,
        benchmark_case=_case_at(),
        description="silu(gate) * up",
    ),
    OpVariant(
        "fused_gate_up",
        fused_gate_up,
        _cases(fused=True),
        ("gate_up",),
        _cost,
        check_module=_needs_silu,
        static_shape=_site_shape,
        benchmark_case=_case_at(fused=True),
        description="silu(first half) * second half",
    ),
    OpVariant(
        "clamped",
        clamped,
        [_case("bounded and offset", (7, 80), form=_BOUNDED_WITH_OFFSET), *_cases(form=_BOUNDED)],
        ("gate", "up"),
        _cost,
        check_module=_silu_if_named,
        static_shape=_site_shape,
        benchmark_case=_case_at(form=_BOUNDED),
        description="gate and up within a limit",
    ),
)

OP = OpSpec(
    name="swiglu_mlp",
    description="SwiGLU activation between an MLP's projections",
    variants={variant.name: variant for variant in _VARIANTS},
)
