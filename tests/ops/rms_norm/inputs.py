"""Inputs of rms_norm."""

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-6


def tensors(*shapes, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator).to(DEVICE, dtype).requires_grad_() for s in shapes]
