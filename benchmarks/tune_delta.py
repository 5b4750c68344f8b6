"""Time opslot's gated delta rule with other launch plans, to choose the one that is committed, and each kernel.

python benchmarks/tune_delta.py
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from opslot import KERNEL_REGISTRY
from opslot.bench import time_forward_backward
from opslot.ops.chunk_gated_delta_rule.kernels import call

DEVICE = torch.device("cuda")
OP = "chunk_gated_delta_rule"
CHANGES: list[dict[str, int]] = [
    {},
    {"state_block": 32},
    {"state_block": 128},
    {"stages": 1},
    {"stages": 3},
    {"grad_block": 64},
    {"key_block": 128},
    {"grad_warps": 4},
]


def print_plan_times(arguments: dict[str, Any]) -> None:
    """Forward plus backward with the committed plan, and with one part of it changed."""
    variant = KERNEL_REGISTRY.op(OP).variant("standard")
    kernel = KERNEL_REGISTRY.load(OP, "standard", "triton")
    committed = call.plan_for
    try:
        for change in CHANGES:
            plan = replace(committed(128, 128, 2), **change)
            call.plan_for = lambda *_, plan=plan: plan  # type: ignore[assignment]
            try:
                time, _ = time_forward_backward(kernel, variant, arguments, DEVICE)
                print(f"{change or 'committed'}: {time.ms:.3f} ms, wall {time.wall_ms:.3f} ms", flush=True)
            except Exception as error:
                print(f"{change}: {type(error).__name__}: {str(error)[:120]}", flush=True)
    finally:
        call.plan_for = committed


def print_kernel_times(arguments: dict[str, Any]) -> None:
    """Device time of each kernel in one forward and backward pass, by torch.profiler."""
    variant = KERNEL_REGISTRY.op(OP).variant("standard")
    kernel = KERNEL_REGISTRY.load(OP, "standard", "triton")
    inputs = {n: t.requires_grad_() if n in variant.differentiable else t for n, t in arguments.items()}
    leaves = [inputs[n] for n in variant.differentiable]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        torch.autograd.grad(kernel(**inputs)[0], leaves, torch.randn_like(inputs["value"]))
        torch.cuda.synchronize()
    print(profile.key_averages().table(sort_by="self_cuda_time_total", row_limit=20, max_name_column_width=60))


def main() -> None:
    for case in KERNEL_REGISTRY.op(OP).variant("standard").cases:
        if case.role == "bench":
            print(case.name)
            arguments = case.make(torch.bfloat16, DEVICE, torch.Generator(DEVICE).manual_seed(0))
            print_plan_times(arguments)
            print_kernel_times(arguments)


if __name__ == "__main__":
    main()
