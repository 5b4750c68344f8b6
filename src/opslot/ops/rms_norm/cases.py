"""Input cases of rms_norm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from opslot.slots import InputCase
from opslot.slots.random_inputs import randn, randn_view


def _case(
    name: str,
    shape: tuple[int, ...],
    roles: tuple[str, ...],
    *,
    role: str = "check",
    view: str = "",
    scale: float = 1.0,
    weight_dtype: torch.dtype | None = None,
    heads: int = 1,
) -> InputCase:
    """One case.

    Args:
        roles: the variant's tensors other than `hidden_states`.
        view: their memory layout.
        heads: rows per token; 1 except for norms of queries and keys.
    """

    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        hidden_states = randn_view(shape, view, dtype, device, generator, scale)
        arguments: dict[str, Any] = {"hidden_states": hidden_states, "eps": 1e-6}
        if "weight" in roles:
            arguments["weight"] = randn(shape[-1:], weight_dtype or dtype, device, generator) * 0.2 + 1.0
        if "gate" in roles:
            arguments["gate"] = randn_view(shape, view, dtype, device, generator)
        if "residual" in roles:
            arguments["residual"] = randn_view(shape, view, dtype, device, generator, scale)
        return arguments

    return InputCase(name, make, role, {"width": shape[-1], "heads": heads})


def cases(*roles: str) -> list[InputCase]:
    cases = [
        _case("model width", (2, 33, 256), roles),
        _case("head width", (3, 5, 7, 128), roles),
        _case("odd width", (6, 42, 123), roles),
        _case("one row", (1, 64), roles),
        _case("narrow", (9, 3), roles),
        _case("no rows", (0, 64), roles),
        _case("column slice", (4, 9, 96), roles, view="columns"),
        _case("transposed rows", (4, 9, 96), roles, view="transposed"),
        _case("tiny values", (64, 160), roles, scale=1e-3),
        _case("large values", (64, 160), roles, scale=1e3),
        _case("16384x4096", (16384, 4096), roles, role="bench"),
        _case("16384x2048", (16384, 2048), roles, role="bench"),
        _case("524288x128", (524288, 128), roles, role="bench", heads=32),
    ]
    if "weight" in roles:
        cases.insert(6, _case("fp32 weight", (3, 11, 64), roles, weight_dtype=torch.float32))
    return cases


def grouped(case: InputCase, groups: int, **options: bool | str) -> InputCase:
    """A case whose rows are `groups`."""

    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        arguments = case.make(dtype, device, generator)
        return {**arguments, "group_size": arguments["weight"].shape[0] // groups, **options}

    return replace(case, make=make)


def offset_group_cases() -> list[InputCase]:
    """Cases of `weight_offset_groups`."""
    roles = ("weight",)
    return [
        _case("whole rows", (2, 33, 256), roles),
        grouped(_case("four groups", (2, 33, 256), roles), 4),
        grouped(_case("three odd groups", (6, 42, 123), roles), 3),
        grouped(_case("one row", (1, 64), roles), 2),
        grouped(_case("no rows", (0, 64), roles), 2),
        grouped(_case("fp32 weight", (3, 11, 64), roles, weight_dtype=torch.float32), 2),
        grouped(_case("column slice", (4, 9, 96), roles, view="columns"), 3),
        grouped(_case("transposed rows", (4, 9, 96), roles, view="transposed"), 2),
        grouped(_case("large values", (64, 160), roles, scale=1e3), 2),
        grouped(_case("Qwen4 residual streams, 16384x8192", (16384, 8192), roles, role="bench"), 4),
    ]


# Options of Falcon-H1's and Kimi's norms.
_FALCON: dict[str, bool | str] = {"gate_after": True, "cast_after_weight": True}


def group_cases() -> list[InputCase]:
    """Cases of `gated_groups`."""
    roles = ("weight", "gate")
    kimi = {**_FALCON, "activation": "sigmoid"}
    return [
        grouped(_case("one group", (2, 33, 256), roles), 1),
        grouped(_case("four groups", (2, 33, 256), roles), 4),
        grouped(_case("three odd groups", (6, 42, 123), roles), 3),
        grouped(_case("gate after", (3, 7, 128), roles), 2, **_FALCON),
        grouped(_case("gate before, cast last", (3, 7, 128), roles), 2, cast_after_weight=True),
        grouped(_case("gate after, fp32 weight", (3, 64), roles, weight_dtype=torch.float32), 2, gate_after=True),
        grouped(_case("one row", (1, 64), roles), 2),
        grouped(_case("fp32 weight", (3, 11, 64), roles, weight_dtype=torch.float32), 2),
        grouped(_case("no rows", (0, 64), roles), 2),
        grouped(_case("column slice", (4, 9, 96), roles, view="columns"), 3),
        grouped(_case("transposed rows", (4, 9, 96), roles, view="transposed"), 2),
        grouped(_case("large values", (64, 160), roles, scale=1e3), 2),
        grouped(_case("sigmoid", (3, 5, 7, 128), roles), 1, **kimi),
        grouped(_case("sigmoid, odd width", (6, 42, 123), roles), 1, **kimi),
        grouped(_case("sigmoid, fp32 weight", (3, 11, 64), roles, weight_dtype=torch.float32), 1, **kimi),
        grouped(_case("sigmoid, tiny values", (64, 160), roles, scale=1e-3), 1, **kimi),
        grouped(_case("sigmoid before", (3, 7, 128), roles), 2, activation="sigmoid"),
        grouped(_case("Kimi delta attention, 524288x128", (524288, 128), roles, role="bench", heads=32), 1, **kimi),
        grouped(_case("Nemotron-3-Nano mixer, T=8192", (8192, 4096), roles, role="bench"), 8),
        grouped(_case("Bamba-9B mixer, T=8192", (8192, 8192), roles, role="bench"), 1),
    ]


def benchmark_case(roles: tuple[str, ...], shape: Mapping[str, int], tokens: int) -> InputCase:
    width, heads = shape["width"], shape["heads"]
    return _case(f"{tokens * heads}x{width}", (tokens * heads, width), roles, role="bench", heads=heads)


def group_benchmark_case(shape: Mapping[str, int], tokens: int) -> InputCase:
    """Of one group, with the gate after it."""
    return grouped(benchmark_case(("weight", "gate"), shape, tokens), 1, **_FALCON)
