"""Time opslot's kernel of a recurrence with other launch plans, to choose the one that is committed, and each kernel.

python benchmarks/tune_recurrence.py chunk_gated_delta_rule
python benchmarks/tune_recurrence.py chunk_gated_delta_rule/per_channel
python benchmarks/tune_recurrence.py mamba_chunk_scan
python benchmarks/tune_recurrence.py mamba_chunk_scan/per_channel
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from opslot import KERNEL_REGISTRY
from opslot.bench.ops import time_forward_backward
from opslot.ops.chunk_gated_delta_rule.kernels import call as delta_rule
from opslot.ops.mamba_chunk_scan.kernels import call as scan
from opslot.ops.mamba_chunk_scan.kernels import selective

DEVICE = torch.device("cuda")


@dataclass(frozen=True)
class Recurrence:
    """What is tuned: the module with `plan_for`, its arguments at the sizes of the cases, and changes of the plan."""

    module: Any
    sizes: tuple[int, ...]
    changes: tuple[dict[str, int], ...]

    def set_plan(self, plan: Callable[..., Any]) -> None:
        self.module.plan_for = plan


RECURRENCES = {
    "chunk_gated_delta_rule": Recurrence(
        delta_rule,
        (128, 128, 2, 227 * 1024),
        (
            {},
            {"state_block": 32},
            {"state_block": 128},
            {"stages": 1},
            {"stages": 3},
            {"grad_block": 32},
            {"grad_block": 64},
            {"grad_block": 64, "grad_warps": 16},
            {"key_block": 128},
            {"grad_warps": 4},
        ),
    ),
    "chunk_gated_delta_rule/per_channel": Recurrence(
        delta_rule,
        (128, 128, 2, 227 * 1024),
        (
            {},
            {"system_warps": 8},
            {"channel_warps": 4},
            {"channel_warps": 16},
            {"value_block": 128},
            {"key_block": 128, "channel_warps": 16},
            {"stages": 2},
            {"state_block": 32},
            {"state_block": 32, "stages": 2},
        ),
    ),
    "mamba_chunk_scan/per_channel": Recurrence(
        selective,
        (),
        (
            {},
            {"forward_chunk": 16},
            {"forward_chunk": 64},
            {"backward_chunk": 8},
            {"backward_chunk": 32},
            {"channels": 64},
            {"channels": 128},
            {"walked": 128},
            {"walked": 512},
            {"walk_stages": 1},
            {"walk_stages": 8},
        ),
    ),
    "mamba_chunk_scan": Recurrence(
        scan,
        (64, 128, 2),
        (
            {},
            {"stages": 1},
            {"stages": 2},
            {"stages": 4},
            {"columns": 32},
            {"columns": 128},
            {"rows": 32},
            {"walk_warps": 8},
            {"read": 32},
            {"read": 128},
            {"out_warps": 8},
            {"token_warps": 8},
            {"shared": 64},
            {"shared_warps": 8},
            {"shared": 64, "shared_warps": 8},
            {"chunk": 128, "out_warps": 8, "token_warps": 8, "shared_warps": 8},
            {"chunk": 128, "out_warps": 8, "token_warps": 16, "shared": 64, "shared_warps": 8},
            {"chunk": 128, "stages": 2, "out_warps": 8, "token_warps": 16, "shared_warps": 16},
        ),
    ),
}


def print_plan_times(recurrence: Recurrence, op: str, name: str, arguments: dict[str, Any]) -> None:
    """Forward plus backward with the committed plan, and with one part of it changed."""
    variant = KERNEL_REGISTRY.op(op).variant(name)
    kernel = KERNEL_REGISTRY.load(op, name, "triton")
    committed = recurrence.module.plan_for
    try:
        for change in recurrence.changes:
            plan = replace(committed(*recurrence.sizes), **change)
            recurrence.set_plan(lambda *_, plan=plan: plan)
            try:
                time, _ = time_forward_backward(kernel, variant, arguments, DEVICE)
                print(f"{change or 'committed'}: {time.ms:.3f} ms, wall {time.wall_ms:.3f} ms", flush=True)
            except Exception as error:
                print(f"{change}: {type(error).__name__}: {str(error)[:120]}", flush=True)
    finally:
        recurrence.set_plan(committed)


def print_kernel_times(op: str, name: str, arguments: dict[str, Any]) -> None:
    """Device time of each kernel in one forward and backward pass, by torch.profiler."""
    variant = KERNEL_REGISTRY.op(op).variant(name)
    kernel = KERNEL_REGISTRY.load(op, name, "triton")
    inputs = {n: t.requires_grad_() if n in variant.differentiable else t for n, t in arguments.items()}
    leaves = [inputs[n] for n in variant.differentiable if n in inputs]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        found = kernel(**inputs)
        out = found[0] if isinstance(found, tuple) else found
        torch.autograd.grad(out, leaves, torch.randn_like(out))
        torch.cuda.synchronize()
    print(profile.key_averages().table(sort_by="self_cuda_time_total", row_limit=20, max_name_column_width=60))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("op", choices=sorted(RECURRENCES))
    asked = parser.parse_args().op
    op, _, name = asked.partition("/")
    name = name or "standard"
    for case in KERNEL_REGISTRY.op(op).variant(name).cases:
        if case.role == "bench":
            print(case.name)
            arguments = case.make(torch.bfloat16, DEVICE, torch.Generator(DEVICE).manual_seed(0))
            print_plan_times(RECURRENCES[asked], op, name, arguments)
            print_kernel_times(op, name, arguments)


if __name__ == "__main__":
    main()
