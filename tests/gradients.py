"""Gradients of a kernel and of its reference, to compare."""

import torch


def gradients(outputs, leaves):
    """Of the leaves, from the same random gradients of the outputs whatever the dtype."""
    generator = torch.Generator().manual_seed(1)
    douts = [torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o) for o in outputs]
    return torch.autograd.grad(outputs, leaves, douts)


def to_float64(arguments):
    return {
        n: t.detach().double().requires_grad_(t.requires_grad)
        if isinstance(t, torch.Tensor) and t.is_floating_point()
        else t
        for n, t in arguments.items()
    }


def leaves_of(arguments):
    return [t for t in arguments.values() if isinstance(t, torch.Tensor) and t.requires_grad]
