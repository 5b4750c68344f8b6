"""Input cases of patch_embed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from opslot.slots import InputCase
from opslot.slots.random_inputs import randn


def _case(
    name: str,
    count: int,
    sizes: tuple[int, ...],
    patch: tuple[int, ...],
    width: int,
    *,
    channels: int = 3,
    bias: bool = True,
    role: str = "check",
    strided: bool = False,
) -> InputCase:
    """`count` inputs of `sizes`; `strided`: with channels last."""

    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        x = randn((count, *sizes, channels) if strided else (count, channels, *sizes), dtype, device, generator)
        # Sums of this many products.
        scale = (channels * math.prod(patch)) ** -0.5
        return {
            "x": x.movedim(-1, 1) if strided else x,
            "weight": randn((width, channels, *patch), dtype, device, generator, scale),
            "bias": randn((width,), dtype, device, generator) if bias else None,
        }

    return InputCase(name, make, role, {"width": width, "patch": channels * math.prod(patch)})


CASES = [
    _case("patches of videos", 12, (2, 4, 4), (2, 4, 4), 40),
    _case("patches without bias", 7, (2, 3, 3), (2, 3, 3), 17, bias=False),
    _case("images", 2, (12, 8), (4, 4), 24),
    _case("images with a remainder", 2, (13, 11), (4, 3), 24, bias=False),
    _case("channels last", 2, (8, 8), (4, 4), 16, strided=True),
    _case("videos", 1, (4, 8, 6), (2, 4, 3), 16, channels=1),
    _case("sequences", 3, (12,), (3,), 8, channels=5),
    _case("one patch", 1, (2, 4, 4), (2, 4, 4), 8),
    _case("no patches", 0, (2, 4, 4), (2, 4, 4), 8),
    _case("16384 patches of Qwen3-VL", 16384, (2, 16, 16), (2, 16, 16), 1152, role="bench"),
    _case("8 images of SigLIP", 8, (896, 896), (14, 14), 1152, role="bench"),
]


def benchmark_case(shape: Mapping[str, int], tokens: int) -> InputCase:
    """Patches [tokens, patch] that were cut before."""
    name = f"{tokens}x{shape['patch']} to {shape['width']}"
    return _case(name, tokens, (shape["patch"],), (shape["patch"],), shape["width"], channels=1, role="bench")
