"""The two losses on a GPU: check every kernel, then time forward + backward beside the floor.

python benchmarks/gpu_loss.py [--out DIR] [--ops a,b] [--skip-check]
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from torch.utils._pytree import tree_leaves

from opslot._base.device import facts_of, package_version
from opslot.slots import KERNEL_REGISTRY, Cost, InputCase, KernelRequest, OpVariant
from opslot.verify.parity import check_kernel

OPS = ("cross_entropy_loss", "load_balancing_loss")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Measured on an H200: a device copy, and the largest bf16 matrix product.
BYTES_PER_SECOND = 4.3e12
FLOPS_PER_SECOND = 790e12


def usable(op_name: str, variant: str, dtype: torch.dtype) -> list[str]:
    request = KernelRequest(op_name, variant, facts_of("cuda"), dtype)
    return [s.name for s in KERNEL_REGISTRY.specs(op_name, variant) if s.unsupported(request) is None]


def check(op_name: str, variant: OpVariant, role: str, dtypes: tuple[torch.dtype, ...]) -> dict[tuple[str, str], bool]:
    """(kernel, case) -> whether it is right in every dtype it claims."""
    verdicts: dict[tuple[str, str], bool] = {}
    for dtype in dtypes:
        for name in usable(op_name, variant.name, dtype):
            kernel = KERNEL_REGISTRY.load(op_name, variant.name, name)
            for case in variant.cases:
                if case.role != role:
                    continue
                result = check_kernel(kernel, op_name, variant, case, dtype, "cuda", name=name)
                verdicts[name, case.name] = verdicts.get((name, case.name), True) and result.ok
                if not result.ok or role == "bench":
                    print(result, flush=True)
                torch.cuda.empty_cache()
    return verdicts


def implementations(op_name: str, variant: OpVariant) -> dict[str, Callable[..., Any]]:
    found = {n: KERNEL_REGISTRY.load(op_name, variant.name, n) for n in usable(op_name, variant.name, torch.bfloat16)}
    found["eager"] = variant.reference
    if op_name == "cross_entropy_loss":
        found["torch.compile"] = torch.compile(variant.reference)
    if variant.name == "causal" and package_version("liger-kernel"):
        found["Liger, its own defaults"] = liger_defaults
    return found


def liger_defaults(hidden_states: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    labels = torch.nn.functional.pad(labels, (0, 1), value=-100)[..., 1:]
    return liger_fused_linear_cross_entropy(hidden_states.flatten(0, -2), weight, labels.reshape(-1))


def timed(function: Callable[..., Any], variant: OpVariant, case: InputCase) -> tuple[float, float, Cost]:
    """(median ms, peak MiB beyond the inputs, cost) of forward + backward."""
    torch.cuda.empty_cache()
    arguments = case.make(torch.bfloat16, torch.device("cuda"), torch.Generator("cpu").manual_seed(0))
    leaves = [x for n in variant.differentiable for x in tree_leaves(arguments[n])]
    for x in leaves:
        x.requires_grad_()

    def step() -> None:
        outputs = [o for o in tree_leaves(function(**arguments)) if isinstance(o, torch.Tensor)]
        torch.autograd.grad(sum(o.sum() for o in outputs), leaves)

    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    ms = triton.testing.do_bench(step, warmup=100, rep=600, return_mode="median")
    assert variant.cost is not None
    return ms, peak, variant.cost(arguments)


def compare(op_name: str, variant: OpVariant, case: InputCase, wrong: set[str]) -> list[dict[str, Any]]:
    rows = []
    for name, function in implementations(op_name, variant).items():
        row: dict[str, Any] = {"op": op_name, "variant": variant.name, "case": case.name, "name": name}
        try:
            ms, peak, cost = timed(function, variant, case)
        except Exception as error:
            row["failed"] = f"{type(error).__name__}: {str(error)[:200]}"
        else:
            floor = 1e3 * max(cost.bytes / BYTES_PER_SECOND, cost.flops / FLOPS_PER_SECOND)
            row |= {"ms": ms, "floor_ms": floor, "peak_mib": peak, "tflops": cost.flops / ms / 1e9}
            row |= {"gbps": cost.bytes / ms / 1e6, "right": name not in wrong}
        rows.append(row)
    return rows


def show(row: dict[str, Any]) -> str:
    head = f"{row['op']:20s} {row['variant']:12.12s} {row['case']:36.36s} {row['name']:24s}"
    if "failed" in row:
        return f"{head} {row['failed'][:60]}"
    if not row["right"]:
        return f"{head} WRONG"
    return (
        f"{head} {row['ms']:8.3f} ms  {row['floor_ms'] / row['ms']:5.0%} of floor {row['floor_ms']:7.3f}"
        f"  {row['tflops']:6.0f} TFLOP/s {row['gbps']:6.0f} GB/s  {row['peak_mib']:8.0f} MiB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--ops", default=",".join(OPS))
    parser.add_argument("--skip-check", action="store_true")
    options = parser.parse_args()
    rows = []
    for op_name in options.ops.split(","):
        for variant in KERNEL_REGISTRY.op(op_name).variants.values():
            wrong: dict[str, set[str]] = {}
            if not options.skip_check:
                verdicts = check(op_name, variant, "check", DTYPES) | check(
                    op_name, variant, "bench", (torch.bfloat16,)
                )
                print(op_name, variant.name, f"{sum(verdicts.values())} of {len(verdicts)} checks passed", flush=True)
                bench = {c.name for c in variant.cases if c.role == "bench"}
                for (name, case), ok in verdicts.items():
                    # A kernel that fails a small case is wrong at every size.
                    for at in [] if ok else ([case] if case in bench else bench):
                        wrong.setdefault(at, set()).add(name)
            for case in variant.cases:
                if case.role == "bench":
                    rows += compare(op_name, variant, case, wrong.get(case.name, set()))
    print("\n".join(show(row) for row in rows))
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    options.out.mkdir(parents=True, exist_ok=True)
    report = {"machine": machine | {"commit": commit}, "rows": rows}
    (options.out / "loss.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
