"""Input cases of adamw."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from opslot.slots import InputCase
from opslot.slots.random_inputs import randn


def _case(
    name: str, shape: tuple[int, ...], step: int, role: str = "check", transposed_grad: bool = False
) -> InputCase:
    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        def draw(scale: float) -> Tensor:
            return randn(shape, dtype, device, generator, scale)

        return {
            "param": draw(0.1),
            "grad": draw(0.01).mT.contiguous().mT if transposed_grad else draw(0.01),
            "exp_avg": draw(0.01),
            "exp_avg_sq": draw(0.01).square(),
            "step": torch.tensor(float(step), device=device),
            "lr": 1e-2,
            "beta1": 0.9,
            "beta2": 0.95,
            "eps": 1e-8,
            "weight_decay": 0.1,
        }

    return InputCase(name, make, role)


CASES = [
    _case("first step", (33, 65), 1),
    _case("later step", (7, 1025), 1000),
    _case("one element", (1,), 3),
    _case("transposed gradient", (33, 65), 2, transposed_grad=True),
    _case("128x1536x2048", (128, 1536, 2048), 10, role="bench"),
]
