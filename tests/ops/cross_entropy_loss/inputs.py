"""Inputs of cross_entropy_loss, and its kernels for CPU and GPU."""

import torch

from opslot import KERNEL_REGISTRY

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KERNELS = ("chunk_loss", "triton")


def load(name, variant="causal"):
    return KERNEL_REGISTRY.load("cross_entropy_loss", variant, name)


def inputs(rows=(2, 9), width=16, vocab=37, dtype=torch.float32, grad=True, seed=0):
    torch.manual_seed(seed)
    hidden = torch.randn(*rows, width).to(DEVICE, dtype)
    weight = (torch.randn(vocab, width) * width**-0.5).to(DEVICE, dtype)
    labels = torch.randint(vocab, rows, device=DEVICE)
    labels[..., :2] = -100
    return hidden.requires_grad_(grad), weight.requires_grad_(grad), labels
