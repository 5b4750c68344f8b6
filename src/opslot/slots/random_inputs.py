"""Small builders for the ops' input cases."""

from __future__ import annotations

import torch
from torch import Tensor


def randn(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, generator: torch.Generator, scale: float = 1.0
) -> Tensor:
    """Normal numbers, drawn in fp32 on the generator's device so that every dtype gets the same values."""
    x = torch.randn(shape, generator=generator, device=generator.device, dtype=torch.float32)
    return (x * scale).to(device=device, dtype=dtype)


def on_device(generator: torch.Generator, device: torch.device) -> torch.Generator:
    """A generator on `device`, seeded from `generator`: large cases are drawn where they are used."""
    seed = int(torch.randint(2**31, (1,), generator=generator, device=generator.device))
    return torch.Generator(device).manual_seed(seed)
