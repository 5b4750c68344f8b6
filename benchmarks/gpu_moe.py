"""moe_experts on a GPU: check every kernel, then time forward + backward beside the floor.

python benchmarks/gpu_moe.py [--out DIR] [--kernels a,b] [--dtypes bfloat16,float16] [--skip-check]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton

from opslot._base.device import facts_of
from opslot.slots import KERNEL_REGISTRY, KernelRequest, OpVariant
from opslot.testing.parity import check_kernel

BYTES_PER_SECOND = 4.3e12
FLOPS_PER_SECOND = 790e12


def usable(dtype: torch.dtype) -> dict[str, str | None]:
    request = KernelRequest("moe_experts", "standard", facts_of("cuda"), dtype)
    return {s.name: s.unusable(request) for s in KERNEL_REGISTRY.specs("moe_experts", "standard")}


def load(name: str) -> Callable[..., Any]:
    return KERNEL_REGISTRY.load("moe_experts", "standard", name)


def check(variant: OpVariant, names: list[str], dtypes: list[torch.dtype]) -> dict[str, list[str]]:
    """Kernel -> what failed."""
    failed: dict[str, list[str]] = {}
    for name in names:
        failed[name] = []
        kernel = load(name)
        for dtype in dtypes:
            if usable(dtype)[name]:
                continue
            for case in variant.cases:
                if case.role != "check" or (name == "fused_quack" and case.name == "odd sizes"):
                    continue
                result = check_kernel(kernel, "moe_experts", variant, case, dtype, "cuda", name=name)
                if not result.ok:
                    failed[name].append(str(result))
                    print(result, flush=True)
        print(f"check {name}: {len(failed[name])} failed", flush=True)
    return failed


def upstream(implementation: str) -> Callable[..., Any]:
    """Transformers' own experts as a function of the contract's tensors."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    def run(hidden_states, gate_up_proj, down_proj, top_k_index, top_k_weights):
        experts, hidden, intermediate = down_proj.shape
        config = Qwen3MoeConfig(hidden_size=hidden, moe_intermediate_size=intermediate, num_experts=experts)
        config._experts_implementation = implementation
        with torch.device("meta"):
            module = Qwen3MoeExperts(config)
        weights = {"gate_up_proj": gate_up_proj, "down_proj": down_proj}
        return torch.func.functional_call(module, weights, (hidden_states, top_k_index, top_k_weights))

    return run


def call(kernel: Callable[..., Any], arguments: dict[str, Any], variant: OpVariant) -> list[torch.Tensor]:
    """Output and gradients for a gradient of random numbers, the same for every kernel."""
    leaves = [arguments[n].requires_grad_() for n in variant.differentiable]
    out = kernel(**arguments)
    grad = torch.randn(out.shape, generator=torch.Generator("cuda").manual_seed(1), device="cuda", dtype=out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def distance(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    """The largest relative error of a tensor, by its norm; the truth is as rounded as the kernel here."""
    return max(((f.float() - w.float()).norm() / w.float().norm()).item() for f, w in zip(found, wanted, strict=True))


def timed(
    kernel: Callable[..., Any], arguments: dict[str, Any], variant: OpVariant, wanted: list[torch.Tensor], rest: float
) -> dict[str, float]:
    """Median milliseconds and peak memory; `rest` seconds of idling first, since a hot chip runs up to 15% slower."""
    error = distance(call(kernel, arguments, variant), wanted)
    leaves = [arguments[n] for n in variant.differentiable]
    grad = torch.randn_like(arguments["hidden_states"])

    def forward() -> torch.Tensor:
        return kernel(**arguments)

    def both() -> None:
        torch.autograd.grad(forward(), leaves, grad)

    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    both()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    time.sleep(rest)
    total = triton.testing.do_bench(both, warmup=25, rep=100, return_mode="median")
    time.sleep(rest)
    with torch.no_grad():
        alone = triton.testing.do_bench(forward, warmup=25, rep=100, return_mode="median")
    return {"ms": total, "forward_ms": alone, "peak_mib": peak / 2**20, "error": error}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--kernels", default="")
    parser.add_argument("--dtypes", default="bfloat16,float16,float32")
    parser.add_argument("--rest", type=float, default=0.5, help="seconds of idling before each timing")
    parser.add_argument("--skip-check", action="store_true")
    parser.add_argument("--skip-bench", action="store_true")
    options = parser.parse_args()
    variant = KERNEL_REGISTRY.op("moe_experts").variant("standard")
    reasons = usable(torch.bfloat16)
    names = options.kernels.split(",") if options.kernels else [n for n, reason in reasons.items() if not reason]
    dtypes = [getattr(torch, d) for d in options.dtypes.split(",")]
    failed = {} if options.skip_check else check(variant, names, dtypes)
    rows = []
    for case in variant.cases:
        if case.role != "bench" or options.skip_bench:
            continue
        generator = torch.Generator("cuda").manual_seed(0)
        arguments = case.make(torch.bfloat16, torch.device("cuda"), generator)
        cost = variant.cost(arguments)
        wanted = call(upstream("grouped_mm"), arguments, variant)
        floor = max(cost.flops / FLOPS_PER_SECOND, cost.bytes / BYTES_PER_SECOND) * 1e3
        for name in [*names, "hf grouped_mm"]:
            row: dict[str, Any] = {"case": case.name, "kernel": name, "floor_ms": floor, "check": "ok"}
            if failed.get(name):
                row["check"] = "WRONG"
            try:
                kernel = upstream(name[3:]) if name.startswith("hf ") else load(name)
                row |= timed(kernel, arguments, variant, wanted, options.rest)
                # Two bf16 results, each within a few roundings of the truth.
                if not row["error"] < 2e-2:
                    row["check"] = f"WRONG: relative error {row['error']:.1e} at this shape"
                row["tflops"] = cost.flops / row["ms"] / 1e9
            except Exception as error:
                traceback.print_exc(limit=3)
                row["check"] = f"raised {type(error).__name__}"
            rows.append(row)
            torch.cuda.empty_cache()
        del arguments, wanted
    print(
        f"{'case':36} {'kernel':14} {'ms':>8} {'forward':>8} {'floor':>7} {'share':>6} "
        f"{'TFLOP/s':>8} {'MiB':>7} {'error':>8} check"
    )
    for r in rows:
        if r["check"] != "ok":
            print(f"{r['case']:36} {r['kernel']:14} {'WRONG':>8} {'':47} {r['check']}")
            continue
        print(
            f"{r['case']:36} {r['kernel']:14} {r['ms']:8.2f} {r['forward_ms']:8.2f} {r['floor_ms']:7.2f} "
            f"{r['floor_ms'] / r['ms']:6.0%} {r['tflops']:8.0f} {r['peak_mib']:7.0f} {r['error']:8.1e} {r['check']}"
        )
    if options.out:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
        record = {
            "machine": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "python": sys.version.split()[0],
            "commit": commit,
            "rest_s": options.rest,
            "rows": rows,
        }
        (options.out / "gpu_moe.json").write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
