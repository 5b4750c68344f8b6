"""Input cases of causal_conv1d."""

from __future__ import annotations

from typing import Any

import torch

from opslot.slots import InputCase
from opslot.slots.random_inputs import randn


def _filter(
    shape: tuple[int, int],
    bias: bool,
    documents: list[int] | None,
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator,
) -> dict[str, Any]:
    """The arguments weight and, where given, bias and cu_seqlens; `documents` are lengths."""
    arguments = {"weight": randn(shape, dtype, device, generator, 0.5)}
    if bias:
        arguments["bias"] = randn(shape[:1], dtype, device, generator)
    if documents is not None:
        arguments["cu_seqlens"] = torch.tensor([0, *documents], device=device).cumsum(0).to(torch.int32)
    return arguments


def _case(
    name: str,
    shape: tuple[int, int, int, int],
    documents: list[int] | None = None,
    role: str = "check",
    bias: bool = False,
    activation: str | None = "silu",
    channels_last: bool = True,
) -> InputCase:
    batch, channels, length, width = shape

    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        # By default [B, S, D] in memory, as the projection before it returns it.
        hidden_states = randn((batch, length, channels), dtype, device, generator).transpose(1, 2)
        hidden_states = hidden_states if channels_last else hidden_states.contiguous()
        return {
            "hidden_states": hidden_states,
            **_filter((channels, width), bias, documents, dtype, device, generator),
            "activation": activation,
        }

    return InputCase(name, make, role)


CASES = [
    # Few filter shapes, since vendor kernels tune for each.
    _case("two rows", (2, 64, 33, 4)),
    _case("odd channels with bias", (2, 43, 70, 4), bias=True),
    _case("three taps, linear, sequence last", (1, 64, 9, 3), activation=None, channels_last=False),
    _case("shorter than the window", (3, 64, 2, 4)),
    _case("packed documents", (1, 64, 40, 4), documents=[2, 1, 30, 7]),
    _case("packed documents, one empty", (1, 43, 21, 4), documents=[5, 0, 3, 13], bias=True),
    _case("packed documents in two rows", (2, 64, 20, 4), documents=[2, 18, 13, 7]),
    _case("8192x8192", (1, 8192, 8192, 4), role="bench"),
    _case("16384x8192 in 16 documents", (1, 8192, 16384, 4), documents=[1024] * 16, role="bench"),
]


def _gated_case(
    name: str,
    shape: tuple[int, int, int, int],
    documents: list[int] | None = None,
    role: str = "check",
    bias: bool = False,
    strided: bool = False,
) -> InputCase:
    batch, channels, length, width = shape

    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        projected = randn((batch, length, (4 if strided else 3) * channels), dtype, device, generator)
        filters = _filter((channels, width), bias, documents, dtype, device, generator)
        return {"projected": projected[..., : 3 * channels], **filters}

    return InputCase(name, make, role)


GATED_CASES = [
    _gated_case("two rows", (2, 64, 33, 3)),
    _gated_case("odd channels with bias", (2, 43, 70, 3), bias=True),
    _gated_case("seven taps, several spans, strided", (1, 64, 150, 7), strided=True),
    _gated_case("shorter than the window", (3, 64, 2, 3)),
    _gated_case("packed documents, one empty", (1, 43, 81, 3), documents=[5, 0, 1, 62, 13], bias=True),
    _gated_case("packed documents in two rows", (2, 64, 20, 3), documents=[2, 18, 13, 7]),
    _gated_case("no tokens", (1, 8, 0, 3)),
    _gated_case("16384x2048", (2, 2048, 8192, 3), role="bench"),
    _gated_case("16384x2048 in 16 documents", (1, 2048, 16384, 3), documents=[1024] * 16, role="bench"),
]
