"""Inputs of moe_experts, and its kernels for CPU and GPU."""

import torch

from opslot import KERNEL_REGISTRY

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KERNELS = ["grouped_mm", "fused_triton"]


def load(name, variant="standard"):
    return KERNEL_REGISTRY.load("moe_experts", variant, name)


def inputs(tokens=11, experts=4, top_k=2, hidden=32, intermediate=16, dtype=torch.float32, seed=0, variant="standard"):
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape, inner=None):
        scale = (inner or shape[-1]) ** -0.5
        return (torch.randn(shape, generator=generator) * scale).to(DEVICE, dtype).requires_grad_()

    index = torch.rand((tokens, experts), generator=generator).topk(top_k).indices.to(DEVICE)
    weights = torch.rand((tokens, top_k), generator=generator).to(DEVICE, dtype).requires_grad_()
    x = randn(tokens, hidden, inner=1)
    if variant == "biased":
        gate_up, down = randn(experts, hidden, 2 * intermediate, inner=hidden), randn(experts, intermediate, hidden)
        biases = [randn(experts, 2 * intermediate, inner=1), randn(experts, hidden, inner=1)]
        return [x, gate_up, down, index, weights, *biases, 1.05, 1.702]
    if variant == "split":
        gate, up = (randn(experts, intermediate, hidden) for _ in range(2))
        return [x, gate, up, randn(experts, intermediate, hidden), index, weights]
    if variant == "transposed":
        gate_up = randn(experts, hidden, 2 * intermediate, inner=hidden)
        return [x, gate_up, randn(experts, intermediate, hidden), index, weights]
    if variant == "ungated":
        return [x, randn(experts, intermediate, hidden), randn(experts, hidden, intermediate), index, weights]
    standard = [x, randn(experts, 2 * intermediate, hidden), randn(experts, hidden, intermediate), index, weights]
    return [*standard, 0.75] if variant == "clamped" else standard
