"""Input cases of hyper_connection."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from opslot.slots import InputCase
from opslot.slots.random_inputs import randn

# Of coefficients: pre; pre and post; pre, post and the matrix.
_HEAD, _INDEPENDENT, _SINKHORN = 1, 2, 3


def _collapse_case(
    name: str,
    shape: tuple[int, int, int, int],
    parts: int,
    role: str = "check",
    *,
    same_dtype: bool = False,
    **options: Any,
) -> InputCase:
    """Streams [B, S, N, D], and parameters in float32, as the models keep them, or in the `same_dtype` as streams."""
    count, width = shape[-2:]
    rows = count * (2 + count if parts == _SINKHORN else parts)

    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        kept = dtype if same_dtype else torch.promote_types(dtype, torch.float32)
        return {
            "streams": randn(shape, dtype, device, generator),
            "fn": randn((rows, count * width), kept, device, generator) * (count * width) ** -0.5,
            "base": randn((rows,), kept, device, generator),
            "scale": 1 + 0.1 * randn((parts,), kept, device, generator),
            **options,
        }

    return InputCase(name, make, role, {"streams": count, "hidden_size": width})


def _collapse_cases(parts: int) -> list[InputCase]:
    return [
        _collapse_case("four streams", (2, 9, 4, 64), parts),
        _collapse_case("two streams, odd width", (1, 37, 2, 45), parts),
        _collapse_case("parameters of the same dtype", (1, 70, 4, 48), parts, same_dtype=True),
        _collapse_case("eight streams", (1, 5, 8, 24), parts),
        _collapse_case("one token", (1, 1, 4, 136), parts),
        _collapse_case("no tokens", (1, 0, 4, 32), parts, same_dtype=True),
    ]


SINKHORN_CASES = [
    *_collapse_cases(_SINKHORN),
    _collapse_case("one iteration", (1, 21, 4, 32), _SINKHORN, iterations=1),
    _collapse_case("8192 tokens of DeepSeek-V4-Flash", (1, 8192, 4, 4096), _SINKHORN, "bench"),
]
INDEPENDENT_CASES = [
    *_collapse_cases(_INDEPENDENT),
    _collapse_case("other magnitude", (1, 21, 4, 32), _INDEPENDENT, magnitude=1.5),
    _collapse_case("8192 tokens of HY-V4", (1, 8192, 4, 2816), _INDEPENDENT, "bench"),
]
HEAD_CASES = [
    *_collapse_cases(_HEAD),
    _collapse_case("8192 tokens", (1, 8192, 4, 4096), _HEAD, "bench"),
]


def collapse_benchmark_case(shape: Mapping[str, int], tokens: int) -> InputCase:
    count, width = shape["streams"], shape["hidden_size"]
    name = f"{tokens} tokens, {count} streams of {width}"
    return _collapse_case(name, (1, tokens, count, width), _SINKHORN, "bench")


def _mix_case(
    name: str, shape: tuple[int, int, int, int], role: str = "check", *, mixed: bool, strided: bool = False
) -> InputCase:
    """Streams [B, S, N, D] and coefficients in float32, as the collapse returns them."""
    batch, tokens, count, width = shape

    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        kept = torch.promote_types(dtype, torch.float32)
        output = randn((batch, tokens, width + (16 if strided else 0)), dtype, device, generator)[..., :width]
        arguments = {"post": 2 * randn((batch, tokens, count), kept, device, generator).sigmoid()}
        if mixed:
            arguments["comb"] = randn((batch, tokens, count, count), kept, device, generator).softmax(-1)
        return {**arguments, "output": output, "streams": randn(shape, dtype, device, generator)}

    return InputCase(name, make, role, {"streams": count, "hidden_size": width})


def _mix_cases(mixed: bool) -> list[InputCase]:
    return [
        _mix_case("four streams", (2, 9, 4, 64), mixed=mixed),
        _mix_case("two streams, odd width", (1, 37, 2, 45), mixed=mixed),
        _mix_case("eight streams, wide", (1, 5, 8, 700), mixed=mixed),
        _mix_case("strided output", (1, 7, 4, 40), mixed=mixed, strided=True),
        _mix_case("no tokens", (1, 0, 4, 32), mixed=mixed),
        _mix_case("8192 tokens, hidden size 4096", (1, 8192, 4, 4096), "bench", mixed=mixed),
    ]


MIX_CASES = _mix_cases(mixed=True)
ADD_CASES = _mix_cases(mixed=False)


def mix_benchmark_case(shape: Mapping[str, int], tokens: int) -> InputCase:
    count, width = shape["streams"], shape["hidden_size"]
    name = f"{tokens} tokens, {count} streams of {width}"
    return _mix_case(name, (1, tokens, count, width), "bench", mixed=True)
