"""Input cases of mlp_activation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from opslot.slots import InputCase
from opslot.slots.random_inputs import randn, randn_view


def of_x(name: str, shape: tuple[int, ...], *, role: str = "check", view: str = "", scale: float = 1.0) -> InputCase:
    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        return {"x": randn_view(shape, view, dtype, device, generator, scale)}

    return InputCase(name, make, role, {"width": shape[-1]})


def of_xielu(
    name: str,
    shape: tuple[int, ...],
    *,
    role: str = "check",
    view: str = "",
    scale: float = 1.0,
    alpha: float = 0.0,
    alpha_dtype: torch.dtype | None = None,
) -> InputCase:
    """`alpha`: added to both alphas, before softplus. `alpha_dtype`: of both, and of the buffers."""

    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        x = randn_view(shape, view, dtype, device, generator, scale)
        own = alpha_dtype or dtype
        alpha_p, alpha_n = (alpha + randn((1,), own, device, generator) for _ in range(2))
        beta, eps = (torch.tensor(value, dtype=own, device=device) for value in (0.5, -1e-6))
        return {"x": x, "alpha_p": alpha_p, "alpha_n": alpha_n, "beta": beta, "eps": eps}

    return InputCase(name, make, role, {"width": shape[-1]})


CaseOf = Callable[..., InputCase]


def cases(case: CaseOf) -> list[InputCase]:
    """The cases of every variant."""
    return [
        case("model width", (2, 33, 256)),
        case("odd width", (3, 7, 123)),
        case("several programs", (3, 2731)),
        case("one row", (1, 40)),
        case("width one", (5, 1)),
        case("no rows", (0, 64)),
        case("column slice", (4, 9, 96), view="columns"),
        case("transposed rows", (4, 9, 96), view="transposed"),
        case("large values", (3, 80), scale=20.0),
        case("16384x21504", (16384, 21504), role="bench"),
        case("8192x14336", (8192, 14336), role="bench"),
    ]


def benchmark_case(case: CaseOf, shape: Mapping[str, int], tokens: int) -> InputCase:
    """A case worth timing, of so many tokens."""
    width = shape["width"]
    return case(f"{tokens}x{width}", (tokens, width), role="bench")


XIELU_CASES = [
    of_xielu("values near eps", (3, 80), scale=2e-6),
    of_xielu("values where expm1 cancels", (3, 80), scale=0.1),
    of_xielu("alphas far below zero", (3, 80), alpha=-12.0),
    of_xielu("alphas where softplus is linear", (3, 80), alpha=25.0),
    of_xielu("alphas in float32", (5, 90), alpha_dtype=torch.float32),
]
