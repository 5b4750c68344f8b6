"""Input cases of linear_fp32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from opslot.slots import InputCase
from opslot.slots.random_inputs import randn


def _case(name: str, lead: tuple[int, ...], width: int, outputs: int, role: str = "check") -> InputCase:
    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        return {
            "x": randn((*lead, width), dtype, device, generator),
            "weight": randn((outputs, width), dtype, device, generator, width**-0.5),
        }

    return InputCase(name, make, role, {"out_features": outputs, "in_features": width})


CASES = [
    _case("tokens", (70,), 64, 8),
    _case("batch of sequences", (2, 33), 256, 64),
    _case("odd sizes", (7,), 37, 5),
    _case("wide", (40,), 2048, 128),
    _case("one token", (1, 1), 48, 4),
    _case("no tokens", (0,), 32, 8),
    _case("16384x2048 to 64 (Moonlight)", (16384,), 2048, 64, role="bench"),
    _case("16384x4096 to 128 (GLM-4.5-Air)", (16384,), 4096, 128, role="bench"),
    _case("8192x7168 to 256 (DeepSeek-V3)", (8192,), 7168, 256, role="bench"),
]


def benchmark_case(shape: Mapping[str, int], tokens: int) -> InputCase:
    width, outputs = shape["in_features"], shape["out_features"]
    return _case(f"{tokens}x{width} to {outputs}", (tokens,), width, outputs, role="bench")
