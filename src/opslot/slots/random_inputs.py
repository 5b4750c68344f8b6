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


def randn_view(
    shape: tuple[int, ...],
    view: str,
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator,
    scale: float = 1.0,
) -> Tensor:
    """`randn` in a memory layout.

    Args:
        view: "columns" for columns of a wider tensor, "transposed" for one whose first two dimensions are swapped in
            memory, "" for a contiguous one.
    """
    *lead, width = shape
    if view == "columns":
        return randn((*lead, width + 8), dtype, device, generator, scale)[..., 8:]
    if view == "transposed":
        first, second, *others = shape
        return randn((second, first, *others), dtype, device, generator, scale).transpose(0, 1)
    return randn(shape, dtype, device, generator, scale)


def on_device(generator: torch.Generator, device: torch.device) -> torch.Generator:
    """A generator on `device`, seeded from `generator`: large cases are drawn where they are used."""
    seed = int(torch.randint(2**31, (1,), generator=generator, device=generator.device))
    return torch.Generator(device).manual_seed(seed)
