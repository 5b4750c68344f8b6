"""Input cases of mamba_chunk_scan."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from opslot.slots import InputCase
from opslot.slots.random_inputs import randn


def _case(
    name: str,
    shape: tuple[int, ...],
    documents: list[int] | None = None,
    role: str = "check",
    plain: bool = False,
    per_channel: bool = False,
    limited: bool = True,
) -> InputCase:
    """Shape: B, S, heads, P, groups, N; `plain` is without D, dt_bias and softplus; `per_channel` decays as Mamba-1.

    `limited` has a dt_limit, which no model with Mamba-1 has.
    """
    batch, length, heads, width, groups, state = shape

    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        def draw(*size: int) -> Tensor:
            return randn(size, dtype, device, generator)

        arguments: dict[str, Any] = {
            "x": draw(batch, length, heads, width),
            "dt": draw(batch, length, heads) - 2.0,
            "A": -draw(heads, *([state] if per_channel else [])).exp(),
            "B": draw(batch, length, groups, state) * state**-0.5,
            "C": draw(batch, length, groups, state),
        }
        if plain:
            arguments["dt"] = arguments["dt"].exp().clamp(max=1.0)
        else:
            arguments |= {"D": draw(heads), "dt_bias": draw(heads), "dt_softplus": True}
            if limited:
                arguments["dt_limit"] = (0.01, 4.0)
        if documents is not None:
            arguments["cu_seqlens"] = torch.tensor([0, *documents], device=device).cumsum(0).to(torch.int32)
        return arguments

    return InputCase(name, make, role)


CASES = [
    _case("two rows", (2, 150, 4, 64, 2, 64)),
    _case("one group, wide state", (1, 70, 2, 32, 1, 256)),
    _case("a group per head, no D", (1, 140, 2, 128, 2, 128), plain=True),
    _case("odd widths", (1, 33, 3, 24, 1, 40)),
    _case("packed documents", (1, 160, 4, 64, 2, 64), documents=[17, 1, 0, 142]),
    _case("packed documents in two rows", (2, 40, 2, 64, 1, 64), documents=[17, 23, 1, 39]),
    _case("8192x128x64, 8 groups, state 128", (1, 8192, 128, 64, 8, 128), role="bench"),
    _case("16384x128x64, 1 group, in 16 documents", (1, 16384, 128, 64, 1, 128), documents=[1024] * 16, role="bench"),
]
_channel_case = partial(_case, per_channel=True)
PER_CHANNEL_CASES = [
    _channel_case("two rows", (2, 37, 40, 1, 1, 4), limited=False),
    _channel_case("two groups, wide state, no D", (1, 10, 4, 1, 2, 18), plain=True),
    _channel_case("packed documents", (1, 70, 24, 1, 1, 3), documents=[17, 1, 0, 52]),
    _channel_case("packed documents in two rows", (2, 40, 24, 1, 1, 2), documents=[17, 23, 1, 39]),
    _channel_case("8192x8192, state 16", (1, 8192, 8192, 1, 1, 16), role="bench", limited=False),
    _channel_case("8192x5120, state 16", (1, 8192, 5120, 1, 1, 16), role="bench", limited=False),
    _channel_case(
        "8192x8192, state 16, in 16 documents",
        (1, 8192, 8192, 1, 1, 16),
        documents=[512] * 16,
        role="bench",
        limited=False,
    ),
]
