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

from opslot.ops._common.cases import randn
from opslot.slots import Cost, InputCase, KernelRequest, OpSpec, OpVariant


def standard(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, in the dtype that torch promotes them to."""
    return nn.functional.silu(gate) * up


def fused_gate_up(gate_up: Tensor) -> Tensor:
    """silu(first half) * second half of one projection's output."""
    gate, up = gate_up.chunk(2, dim=-1)
    return nn.functional.silu(gate) * up


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


def _case(
    name: str, shape: tuple[int, ...], *, fused: bool, role: str = "check", view: str = "", scale: float = 1.0
) -> InputCase:
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
            return {"gate": gate, "up": up}
        return {"gate": tensor(width), "up": tensor(width)}

    return InputCase(name, make, role, {"width": shape[-1]})


def _cases(fused: bool) -> list[InputCase]:
    cases = [
        _case("model width", (2, 33, 256), fused=fused),
        _case("odd width", (3, 7, 123), fused=fused),
        _case("one row", (1, 40), fused=fused),
        _case("width one", (5, 1), fused=fused),
        _case("no rows", (0, 64), fused=fused),
        _case("column slice", (4, 9, 96), fused=fused, view="columns"),
        _case("transposed rows", (4, 9, 96), fused=fused, view="transposed"),
        _case("saturated", (3, 80), fused=fused, scale=20.0),
        _case("16384x12288", (16384, 12288), fused=fused, role="bench"),
        _case("16384x768", (16384, 768), fused=fused, role="bench"),
    ]
    if not fused:
        cases.insert(5, _case("halves of one projection", (4, 5, 64), fused=False, view="halves"))
    return cases


def _site_shape(request: KernelRequest) -> Mapping[str, int] | None:
    down = getattr(request.module, "down_proj", None)
    width = getattr(down, "in_features", None)
    return None if width is None else {"width": width}


def _case_at(fused: bool) -> Callable[[Mapping[str, int], int], InputCase]:
    def case_at(shape: Mapping[str, int], tokens: int) -> InputCase:
        width = shape["width"]
        return _case(f"{tokens}x{width}", (tokens, width), fused=fused, role="bench")

    return case_at


def _cost(arguments: Mapping[str, Any]) -> Cost:
    """Forward reads gate and up and writes out; backward reads them and dout and writes two gradients."""
    tensors = [x for x in arguments.values() if isinstance(x, Tensor)]
    size = sum(x.numel() * x.element_size() for x in tensors)
    return Cost(bytes=4 * size)


_VARIANTS = (
    OpVariant(
        "standard",
        standard,
        _cases(fused=False),
        ("gate", "up"),
        _cost,
        check_site=_needs_silu,
        site_shape=_site_shape,
        case_at=_case_at(fused=False),
        description="silu(gate) * up",
    ),
    OpVariant(
        "fused_gate_up",
        fused_gate_up,
        _cases(fused=True),
        ("gate_up",),
        _cost,
        check_site=_needs_silu,
        site_shape=_site_shape,
        case_at=_case_at(fused=True),
        description="silu(first half) * second half",
    ),
)

OP = OpSpec(
    name="swiglu_mlp",
    description="SwiGLU activation between an MLP's projections",
    variants={variant.name: variant for variant in _VARIANTS},
)
