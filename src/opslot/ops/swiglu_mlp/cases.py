"""Input cases of swiglu_mlp."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opslot.ops._common.activations import ACTIVATIONS
from opslot.slots import InputCase
from opslot.slots.random_inputs import randn_view


def _case(
    name: str,
    shape: tuple[int, ...],
    *,
    fused: bool = False,
    form: Mapping[str, Any] | None = None,
    role: str = "check",
    view: str = "",
    halves: bool = False,
    scale: float = 1.0,
) -> InputCase:
    """`form`: the arguments other than tensors. `halves`: gate and up are columns of one tensor."""

    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        *lead, width = shape

        def tensor(columns: int) -> Tensor:
            return randn_view((*lead, columns), view, dtype, device, generator, scale)

        if fused:
            return {"gate_up": tensor(2 * width), **(form or {})}
        if halves:
            gate, up = tensor(2 * width).chunk(2, dim=-1)
            return {"gate": gate, "up": up, **(form or {})}
        return {"gate": tensor(width), "up": tensor(width), **(form or {})}

    return InputCase(name, make, role, {"width": shape[-1]})


# Limits that are exact in bf16 and fp16, and that many normally distributed values exceed.
_BOUNDED = {"limit": 1.5}
_BOUNDED_WITH_OFFSET = {"limit": 1.25, "alpha": 1.702, "up_offset": 1.0}


def _cases(fused: bool = False, form: Mapping[str, Any] | None = None) -> list[InputCase]:
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
        cases.insert(5, case("halves of one projection", (4, 5, 64), halves=True))
    return cases


def benchmark_case(shape: Mapping[str, int], tokens: int, **options: Any) -> InputCase:
    width = shape["width"]
    return _case(f"{tokens}x{width}", (tokens, width), role="bench", **options)


def _with_activations(cases: list[InputCase], fused: bool = False) -> list[InputCase]:
    """`cases`, which are of SiLU, then one of each other activation."""
    names = [name for name in ACTIVATIONS if name != "silu"]
    others = [_case(name, (5, 90), fused=fused, form={"activation": name}, scale=2.0) for name in names]
    gemma = _case("16384x15360 gelu_tanh", (16384, 15360), fused=fused, form={"activation": "gelu_tanh"}, role="bench")
    return [*cases, *others, gemma]


CASES = _with_activations(_cases())
FUSED_CASES = _with_activations(_cases(fused=True), fused=True)
CLAMPED_CASES = [_case("bounded and offset", (7, 80), form=_BOUNDED_WITH_OFFSET), *_cases(form=_BOUNDED)]

fused_benchmark_case = partial(benchmark_case, fused=True)
clamped_benchmark_case = partial(benchmark_case, form=_BOUNDED)
