"""Inputs of mamba_chunk_scan."""

import torch

OPTIONS = {"dt_softplus": True, "dt_limit": (0.01, 2.0)}


def inputs(length, batch=1, heads=4, width=16, groups=2, state=24, dtype=torch.float64, device="cpu", columns=()):
    """`columns`: further dims of A, (state,) in the variant per_channel."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    made = {
        "x": draw(batch, length, heads, width),
        "dt": draw(batch, length, heads) - 1,
        "A": -draw(heads, *columns).exp(),
        "B": draw(batch, length, groups, state) / state**0.5,
        "C": draw(batch, length, groups, state),
        "D": draw(heads),
        "dt_bias": draw(heads),
    }
    return {n: t.to(device, dtype).requires_grad_() for n, t in made.items()}


def draw_states(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def assert_same(found, expected, atol=1e-11):
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=atol)
