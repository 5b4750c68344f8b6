"""Input cases of linear."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from opslot.ops._common.aligned_rows import padded_width
from opslot.slots import InputCase
from opslot.slots.random_inputs import randn


def _case(
    name: str,
    rows: tuple[int, ...],
    width: int,
    outputs: int,
    *,
    bias: bool = False,
    view: str = "",
    role: str = "check",
) -> InputCase:
    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        if view == "columns":
            x = randn((*rows, width + 8), dtype, device, generator)[..., 8:]
        elif view == "padded rows":
            x = randn((*rows, padded_width(width, dtype)), dtype, device, generator)[..., :width]
        else:
            x = randn((*rows, width), dtype, device, generator)
        if view == "transposed weight":
            weight = randn((width, outputs), dtype, device, generator, width**-0.5).t()
        else:
            weight = randn((outputs, width), dtype, device, generator, width**-0.5)
        return {"input": x, "weight": weight, "bias": randn((outputs,), dtype, device, generator) if bias else None}

    return InputCase(name, make, role, {"width": width, "outputs": outputs})


CASES = [
    _case("several tiles", (2, 70), 96, 80),
    _case("bias, odd rows", (3, 7), 48, 32, bias=True),
    _case("bias, odd sizes", (3, 7), 45, 37, bias=True),
    _case("one token", (1,), 64, 33),
    _case("no tokens", (0,), 16, 24, bias=True),
    _case("column slice", (4, 9), 40, 16, view="columns"),
    _case("transposed weight", (11,), 40, 48, view="transposed weight"),
    _case("16384 tokens, 4096 to 4096", (16384,), 4096, 4096, role="bench"),
]
UNALIGNED_CASES = [
    *CASES[2:5],
    _case("unaligned input", (2, 70), 45, 48, bias=True),
    _case("unaligned output", (2, 70), 96, 83, bias=True),
    _case("padded rows", (2, 70), 45, 37, view="padded rows"),
    _case("column slice", (4, 9), 45, 19, view="columns"),
    _case("transposed weight", (11,), 43, 45, view="transposed weight"),
    _case("16384 tokens, 1280 to 3420", (16384,), 1280, 3420, bias=True, role="bench"),
]


def benchmark_case(shape: Mapping[str, int], tokens: int) -> InputCase:
    width, outputs = shape["width"], shape["outputs"]
    return _case(f"{tokens} tokens, {width} to {outputs}", (tokens,), width, outputs, role="bench")
