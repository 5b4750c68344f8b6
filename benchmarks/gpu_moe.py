"""moe_experts on a GPU: check every kernel of every variant, then time forward + backward beside the floor.

python benchmarks/gpu_moe.py [--out DIR] [--commit ID] [--variants a,b] [--kernels a,b] [--dtypes bfloat16,float16]
    [--cases TEXT] [--skip-check] [--skip-bench]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton

from opslot._base.device import facts_of, package_version
from opslot.bench.baselines.hf import grouped_mm
from opslot.slots import KERNEL_REGISTRY, KernelRequest, OpVariant
from opslot.verify.parity import check_kernel

BYTES_PER_SECOND = 4.3e12
FLOPS_PER_SECOND = 790e12
PACKAGES = ("torch", "triton", "transformers", "quack-kernels", "nvidia-cutlass-dsl")


def usable(variant: str, dtype: torch.dtype) -> dict[str, str | None]:
    request = KernelRequest("moe_experts", variant, facts_of("cuda"), dtype)
    return {s.name: s.unsupported(request) for s in KERNEL_REGISTRY.specs("moe_experts", variant)}


def check(variant: OpVariant, names: list[str], dtypes: list[torch.dtype]) -> dict[str, list[str]]:
    """Kernel -> what failed."""
    failed: dict[str, list[str]] = {}
    for name in names:
        failed[name] = []
        kernel = KERNEL_REGISTRY.load("moe_experts", variant.name, name)
        for dtype in dtypes:
            if usable(variant.name, dtype)[name]:
                continue
            for case in variant.cases:
                if case.role != "check":
                    continue
                result = check_kernel(kernel, "moe_experts", variant, case, dtype, "cuda", name=name)
                if not result.ok:
                    failed[name].append(str(result))
                    print(result, flush=True)
        print(f"check {variant.name} {name}: {len(failed[name])} failed", flush=True)
    return failed


def upstream_biased(
    hidden_states: torch.Tensor,
    gate_up_proj: torch.Tensor,
    down_proj: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    gate_up_proj_bias: torch.Tensor,
    down_proj_bias: torch.Tensor,
    limit: float,
    alpha: float,
) -> torch.Tensor:
    """Transformers' own gpt-oss experts with its grouped_mm, as a function of the contract's tensors."""
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    experts, intermediate, hidden = down_proj.shape
    config = GptOssConfig(hidden_size=hidden, intermediate_size=intermediate, num_local_experts=experts)
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        module = GptOssExperts(config)
    module.limit, module.alpha = limit, alpha
    weights = {
        "gate_up_proj": gate_up_proj,
        "down_proj": down_proj,
        "gate_up_proj_bias": gate_up_proj_bias,
        "down_proj_bias": down_proj_bias,
    }
    return torch.func.functional_call(module, weights, (hidden_states, top_k_index, top_k_weights))


UPSTREAM = {"standard": grouped_mm, "biased": upstream_biased}


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


def bench(variant: OpVariant, names: list[str], failed: dict[str, list[str]], options: Any) -> list[dict[str, Any]]:
    rows = []
    kernels = {n: KERNEL_REGISTRY.load("moe_experts", variant.name, n) for n in names}
    if variant.name in UPSTREAM:
        kernels["hf grouped_mm"] = UPSTREAM[variant.name]
    kernels["eager"] = variant.reference
    for case in variant.cases:
        if case.role != "bench" or options.cases not in case.name:
            continue
        arguments = case.make(torch.bfloat16, torch.device("cuda"), torch.Generator("cuda").manual_seed(0))
        cost = variant.cost(arguments)
        wanted = call(variant.reference, arguments, variant)
        floor = max(cost.flops / FLOPS_PER_SECOND, cost.bytes / BYTES_PER_SECOND) * 1e3
        for name, kernel in kernels.items():
            row: dict[str, Any] = {"variant": variant.name, "case": case.name, "kernel": name, "floor_ms": floor}
            row["check"] = "WRONG" if failed.get(name) else "ok"
            try:
                row |= timed(kernel, arguments, variant, wanted, options.rest)
                # Two bf16 results, each within a few tolerance_ulps of the truth.
                if not row["error"] < 2e-2:
                    row["check"] = f"WRONG: relative error {row['error']:.1e} at this shape"
                row["tflops"] = cost.flops / row["ms"] / 1e9
            except Exception as error:
                traceback.print_exc(limit=3)
                row["check"] = f"raised {type(error).__name__}"
            rows.append(row)
            torch.cuda.empty_cache()
        del arguments, wanted
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    print(
        f"{'variant':9} {'case':31} {'kernel':14} {'ms':>8} {'forward':>8} {'floor':>7} {'share':>6} "
        f"{'TFLOP/s':>8} {'MiB':>7} {'error':>8} check"
    )
    for r in rows:
        head = f"{r['variant']:9} {r['case']:31} {r['kernel']:14}"
        if r["check"] != "ok":
            print(f"{head} {'WRONG':>8} {'':47} {r['check']}")
            continue
        print(
            f"{head} {r['ms']:8.2f} {r['forward_ms']:8.2f} {r['floor_ms']:7.2f} "
            f"{r['floor_ms'] / r['ms']:6.0%} {r['tflops']:8.0f} {r['peak_mib']:7.0f} {r['error']:8.1e} {r['check']}"
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--commit", default="", help="commit id to record; the machine may have no history")
    parser.add_argument("--variants", default="standard,clamped,biased,split")
    parser.add_argument("--kernels", default="")
    parser.add_argument("--cases", default="", help="only those whose name contains this")
    parser.add_argument("--dtypes", default="bfloat16,float16,float32")
    parser.add_argument("--rest", type=float, default=0.5, help="seconds of idling before each timing")
    parser.add_argument("--skip-check", action="store_true")
    parser.add_argument("--skip-bench", action="store_true")
    options = parser.parse_args()
    dtypes = [getattr(torch, d) for d in options.dtypes.split(",")]
    rows = []
    for variant_name in options.variants.split(","):
        variant = KERNEL_REGISTRY.op("moe_experts").variant(variant_name)
        names = [n for n, reason in usable(variant_name, torch.bfloat16).items() if not reason]
        names = [n for n in names if n in options.kernels.split(",")] if options.kernels else names
        failed = {} if options.skip_check else check(variant, names, dtypes)
        if not options.skip_bench:
            rows += bench(variant, names, failed, options)
    show(rows)
    if options.out:
        record = {
            "machine": torch.cuda.get_device_name(),
            "python": sys.version.split()[0],
            "versions": {p: version for p in PACKAGES if (version := package_version(p))},
            "commit": options.commit,
            "date": time.strftime("%Y-%m-%d"),
            "rest_s": options.rest,
            "rows": rows,
        }
        (options.out / "gpu_moe.json").write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
