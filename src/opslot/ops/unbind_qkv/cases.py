"""Input cases of unbind_qkv."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from opslot.slots import InputCase
from opslot.slots.random_inputs import randn


def _case(
    name: str, lead: tuple[int, ...], heads: int, width: int, *, role: str = "check", strided: bool = False
) -> InputCase:
    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        if strided:
            return {"qkv": randn((*lead, heads, 3, width), dtype, device, generator).transpose(-3, -2)}
        return {"qkv": randn((*lead, 3, heads, width), dtype, device, generator)}

    return InputCase(name, make, role, {"heads": heads, "head_dim": width})


CASES = [
    _case("tower", (70,), 4, 72),
    _case("batch of sequences", (2, 9), 3, 64),
    _case("odd sizes", (7,), 5, 13),
    _case("heads first", (6,), 4, 16, strided=True),
    _case("one token", (1,), 2, 8),
    _case("no tokens", (0,), 2, 8),
    _case("40960 patches of Qwen3-VL", (40960,), 16, 72, role="bench"),
    _case("16384 patches of Qwen2.5-VL", (16384,), 16, 80, role="bench"),
]


def benchmark_case(shape: Mapping[str, int], tokens: int) -> InputCase:
    heads, width = shape["heads"], shape["head_dim"]
    return _case(f"{tokens} tokens, {heads} heads of {width}", (tokens,), heads, width, role="bench")


def _sliced_case(
    name: str, lead: tuple[int, ...], heads: int, kv_heads: int, width: int, *, role: str = "check"
) -> InputCase:
    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        ends = {"query_end": heads * width, "key_end": (heads + kv_heads) * width}
        qkv = randn((*lead, (heads + 2 * kv_heads) * width), dtype, device, generator)
        return {"qkv": qkv, **ends, "head_dim": width}

    return InputCase(name, make, role, {"heads": heads, "num_key_value_heads": kv_heads, "head_dim": width})


SLICED_CASES = [
    _sliced_case("grouped heads", (2, 9), 4, 2, 64),
    _sliced_case("one group, odd sizes", (7,), 5, 1, 13),
    _sliced_case("as many heads", (1, 6), 3, 3, 96),
    _sliced_case("no tokens", (1, 0), 2, 1, 8),
    _sliced_case("16384 tokens of Phi-4", (2, 8192), 40, 10, 128, role="bench"),
]


def sliced_benchmark_case(shape: Mapping[str, int], tokens: int) -> InputCase:
    heads, kv_heads, width = shape["heads"], shape["num_key_value_heads"], shape["head_dim"]
    name = f"{tokens} tokens, {heads}/{kv_heads} heads of {width}"
    return _sliced_case(name, (1, tokens), heads, kv_heads, width, role="bench")
