"""Input cases of expand_kv."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from opslot.slots import InputCase
from opslot.slots.random_inputs import randn


def _case(
    name: str,
    sizes: tuple[int, int, int],
    widths: tuple[int, int, int],
    *,
    memory: str = "tokens",
    k_rot_dtype: torch.dtype | None = None,
    role: str = "check",
) -> InputCase:
    """One case of sizes (B, S, heads) and widths (nope, rope, v).

    Args:
        memory: "tokens" for transposed views of [B, S, heads, nope + v], as projections return; "heads" for contiguous
            [B, heads, S, nope + v]; "channels" for adjacent tokens.
    """

    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        (batch, tokens, heads), (nope, rope, v) = sizes, widths
        if memory == "tokens":
            kv = randn((batch, tokens, heads, nope + v), dtype, device, generator).transpose(1, 2)
        elif memory == "heads":
            kv = randn((batch, heads, tokens, nope + v), dtype, device, generator)
        else:
            kv = randn((batch, heads, nope + v, tokens), dtype, device, generator).transpose(2, 3)
        # One projection returns the compressed keys and values, and the rotated part behind them.
        compressed = randn((batch, 1, tokens, 16 + rope), k_rot_dtype or dtype, device, generator)
        return {"kv": kv, "k_rot": compressed[..., 16:], "qk_nope_head_dim": nope}

    shape = {"heads": sizes[2], "nope": widths[0], "rope": widths[1], "v": widths[2]}
    return InputCase(name, make, role, shape)


CASES = [
    _case("rope of half the width", (2, 9, 4), (32, 16, 32)),
    _case("wide heads", (1, 3, 3), (192, 64, 256)),
    _case("odd sizes", (2, 5, 3), (11, 7, 5)),
    _case("many heads", (1, 2, 70), (128, 64, 128)),
    _case("contiguous heads", (2, 4, 4), (24, 8, 40), memory="heads"),
    _case("adjacent tokens", (1, 6, 2), (16, 8, 16), memory="channels"),
    _case("fp32 rope", (1, 5, 2), (16, 8, 16), k_rot_dtype=torch.float32),
    _case("no rope", (2, 5, 2), (16, 0, 16)),
    _case("no tokens", (1, 0, 2), (16, 8, 16)),
    _case("16384 tokens of Moonlight", (2, 8192, 16), (128, 64, 128), role="bench"),
]


def benchmark_case(shape: Mapping[str, int], tokens: int) -> InputCase:
    heads, nope, rope, v = (shape[name] for name in ("heads", "nope", "rope", "v"))
    name = f"{tokens} tokens, {heads} heads of {nope} + {rope} and {v}"
    return _case(name, (1, tokens, heads), (nope, rope, v), role="bench")
