"""Input cases of load_balancing_loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from opslot.slots import InputCase
from opslot.slots.random_inputs import on_device, randn


def _case(
    name: str,
    layers: int,
    tokens: tuple[int, int],
    experts: int,
    top_k: int,
    role: str = "check",
    *,
    masked: bool = False,
    strided: bool = False,
) -> InputCase:
    """Logits of a row are distinct, also in 16 bits and after the softmax: with ties the choice would be ambiguous."""

    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        rows = tokens[0] * tokens[1]
        if role == "bench":
            generator = on_device(generator, device)
        home = generator.device
        steps = torch.linspace(-3.0, 3.0, experts, device=home)
        # Experts differ in popularity, so that the loss is away from its minimum.
        popularity = torch.linspace(0.0, 1.5, experts, device=home)
        logits = []
        for _ in range(layers):
            order = (randn((rows, experts), torch.float32, home, generator) + popularity).argsort(-1).argsort(-1)
            padded = experts + (8 if strided else 0)
            layer = torch.empty(rows, padded, dtype=dtype, device=device)[:, :experts]
            # Each row has another scale: the same values in every row would round the same way in every row.
            sharpness = 1.0 + 0.2 * randn((rows, 1), torch.float32, home, generator).abs()
            logits.append(layer.copy_(steps[order] * sharpness))
        arguments: dict[str, Any] = {"gate_logits": tuple(logits), "num_experts": experts, "top_k": top_k}
        if masked:
            lengths = torch.randint(1, tokens[1] + 1, (tokens[0], 1), generator=generator, device=home)
            arguments["attention_mask"] = (torch.arange(tokens[1], device=home) < lengths).long().to(device)
        return arguments

    return InputCase(name, make, role, {"layers": layers, "experts": experts, "top_k": top_k})


CASES = [
    _case("three layers", 3, (2, 37), 8, 2),
    _case("masked", 3, (3, 29), 16, 4, masked=True),
    _case("odd number of experts", 2, (1, 70), 13, 3, masked=True),
    _case("one layer, one choice", 1, (1, 33), 4, 1),
    _case("all experts chosen", 2, (2, 9), 4, 4),
    _case("strided view", 2, (2, 25), 16, 2, strided=True),
    _case("many experts", 2, (1, 65), 128, 8),
    _case("48 layers x 16384 x 128, top 8", 48, (2, 8192), 128, 8, "bench"),
    _case("48 layers x 16384 x 128, top 8, masked", 48, (2, 8192), 128, 8, "bench", masked=True),
    _case("58 layers x 8192 x 256, top 8", 58, (1, 8192), 256, 8, "bench"),
]


def benchmark_case(shape: Mapping[str, int], tokens: int) -> InputCase:
    layers, experts, top_k = shape["layers"], shape["experts"], shape["top_k"]
    name = f"{layers} layers x {tokens} x {experts}, top {top_k}"
    return _case(name, layers, (1, tokens), experts, top_k, "bench")
