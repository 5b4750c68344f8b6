"""Input cases of chunk_gated_delta_rule."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from opslot.slots import InputCase
from opslot.slots.random_inputs import randn


def _case(
    name: str,
    shape: tuple[int, ...],
    documents: list[int] | None = None,
    role: str = "check",
    per_channel: bool = False,
) -> InputCase:
    """Shape: B, S, key heads, value heads, key width, value width; `per_channel` has decays of channels."""
    batch, length, k_heads, v_heads, width, v_width = shape

    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        def draw(*size: int) -> Tensor:
            return randn(size, dtype, device, generator)

        arguments: dict[str, Any] = {
            "query": draw(batch, length, k_heads, width),
            "key": draw(batch, length, k_heads, width),
            "value": draw(batch, length, v_heads, v_width),
            "g": logsigmoid(draw(batch, length, v_heads, *([width] if per_channel else [])) + 2.0),
            "beta": draw(batch, length, v_heads).sigmoid(),
            "use_qk_l2norm_in_kernel": True,
        }
        if documents is not None:
            arguments["cu_seqlens"] = torch.tensor([0, *documents], device=device).cumsum(0).to(torch.int32)
        return arguments

    return InputCase(name, make, role)


CASES = [
    # The same head sizes for all cases, since vendor kernels tune for each.
    _case("two rows", (2, 70, 2, 4, 64, 64)),
    _case("packed documents", (1, 88, 2, 4, 64, 64), documents=[17, 1, 0, 70]),
    _case("packed documents in two rows", (2, 40, 2, 4, 64, 64), documents=[17, 23, 1, 39]),
    _case("heads of 128", (1, 70, 1, 2, 128, 128), documents=[17, 53]),
    _case("8192x32x128", (1, 8192, 16, 32, 128, 128), role="bench"),
    _case("32768x8x128", (1, 32768, 8, 8, 128, 128), role="bench"),
    _case("16384x32x128 in 16 documents", (1, 16384, 16, 32, 128, 128), documents=[1024] * 16, role="bench"),
]
_channel_case = partial(_case, per_channel=True)
PER_CHANNEL_CASES = [
    _channel_case("two rows", (2, 70, 2, 2, 64, 64)),
    _channel_case("packed documents", (1, 88, 1, 2, 64, 32), documents=[17, 1, 0, 70]),
    _channel_case("packed documents in two rows", (2, 40, 1, 1, 32, 64), documents=[17, 23, 1, 39]),
    _channel_case("odd widths", (1, 9, 1, 2, 24, 40)),
    _channel_case("8192x32x128", (1, 8192, 32, 32, 128, 128), role="bench"),
    _channel_case("8192x32x128 in 16 documents", (1, 8192, 32, 32, 128, 128), documents=[512] * 16, role="bench"),
]
