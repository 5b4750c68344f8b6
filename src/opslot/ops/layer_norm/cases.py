"""Input cases of layer_norm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from opslot.slots import InputCase
from opslot.slots.random_inputs import randn, randn_view


def _case(
    name: str,
    shape: tuple[int, ...],
    *,
    role: str = "check",
    weight: bool = True,
    bias: bool = True,
    view: str = "",
    scale: float = 1.0,
    mean: float = 0.0,
) -> InputCase:
    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        width = shape[-1]
        x = randn_view(shape, view, dtype, device, generator, scale)
        return {
            "hidden_states": x + mean if mean else x,
            "weight": randn((width,), dtype, device, generator) * 0.2 + 1.0 if weight else None,
            "bias": randn((width,), dtype, device, generator) if bias else None,
            "eps": 1e-6,
        }

    return InputCase(name, make, role, {"width": shape[-1]})


CASES = [
    _case("tower width", (2, 33, 144)),
    _case("odd width", (6, 42, 123)),
    _case("several rows a tile", (70, 24)),
    _case("one row", (1, 64)),
    _case("narrow", (9, 3)),
    _case("no rows", (0, 64)),
    _case("no bias", (3, 11, 64), bias=False),
    _case("no weight", (3, 11, 64), weight=False),
    _case("no weight, no bias", (3, 11, 64), weight=False, bias=False),
    _case("column slice", (4, 9, 96), view="columns"),
    _case("transposed rows", (4, 9, 96), view="transposed"),
    _case("tiny values", (64, 160), scale=1e-3),
    _case("large values", (64, 160), scale=1e3),
    _case("mean of 10", (64, 160), mean=10.0),
    _case("nearly equal values", (33, 123), scale=1e-3, mean=30.0),
    _case("one channel", (33, 1)),
    _case("40960x1152", (40960, 1152), role="bench"),
    _case("16384x4096", (16384, 4096), role="bench"),
    _case("8192x768", (8192, 768), role="bench"),
]


def benchmark_case(shape: Mapping[str, int], tokens: int) -> InputCase:
    width = shape["width"]
    return _case(f"{tokens}x{width}", (tokens, width), role="bench")
