"""causal_conv1d and chunk_gated_delta_rule on a GPU: proof and forward plus backward in bf16, at Qwen3-Next's sizes.

    python benchmarks/gpu_delta.py [--output FILE] [--commit ID] [--op NAME] [--plans] [--without fla]

Beside opslot's kernels stands what Transformers runs without them ("hf eager"), which knows no packed documents. fla
tunes itself before its first call at each size, for minutes where no cache of Triton's has it, and is left out where
its gradients are wrong (Hopper with Triton 3.4 to 3.7.0). opslot's own delta rule is also proven at the timed sizes,
since the cases that every kernel is proven on are narrower. `--plans` times it cut in other ways, and each of its
kernels.
"""

from __future__ import annotations

import argparse
import inspect
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from opslot import KERNEL_REGISTRY
from opslot.bench import BenchRow, as_dict, bench, environment, time_both_ways
from opslot.slots import InputCase, format_table
from opslot.verify.parity import CheckResult, compare, expect

DELTA = "chunk_gated_delta_rule"
OPS = ("causal_conv1d", DELTA)
DEVICE = torch.device("cuda")


def upstream(op: str) -> Callable[..., Any]:
    """Transformers' own code, without the argument it would leave out."""
    from transformers.models.qwen3_next import modeling_qwen3_next as modeling

    if op == DELTA:
        # Newer releases wrap it in what prefers fla's where that is installed.
        return inspect.unwrap(modeling.torch_chunk_gated_delta_rule)
    return lambda hidden_states, weight, activation: torch.nn.functional.silu(
        torch.nn.functional.conv1d(
            hidden_states, weight.unsqueeze(1), padding=weight.shape[1] - 1, groups=weight.shape[0]
        )[..., : hidden_states.shape[-1]]
    )


def upstream_rows(op: str) -> list[BenchRow]:
    variant = KERNEL_REGISTRY.op(op).variant("standard")
    found = []
    for case in variant.cases:
        if case.role != "bench":
            continue
        arguments = case.make(torch.bfloat16, DEVICE, torch.Generator(DEVICE).manual_seed(0))
        packed = arguments.pop("cu_seqlens", None) is not None
        row = BenchRow(op, "standard", case.name, "hf eager", "bfloat16")
        if op == DELTA:
            groups = arguments["value"].shape[2] // arguments["key"].shape[2]
            arguments |= {n: arguments[n].repeat_interleave(groups, 2) for n in ("query", "key")}
        try:
            time, peak = time_both_ways(upstream(op), variant, arguments, DEVICE)
            verdict = "mixes documents" if packed else "ok"
            row = replace(row, ms=time.ms, alone_ms=time.alone_ms, peak_mib=peak, verdict=verdict)
        except Exception as error:
            row = replace(row, verdict=f"{type(error).__name__}: {str(error)[:120]}")
        torch.cuda.empty_cache()
        found.append(row)
    return found


def timed_cases() -> list[InputCase]:
    return [case for case in KERNEL_REGISTRY.op(DELTA).variant("standard").cases if case.role == "bench"]


def drawn(case: InputCase) -> dict[str, Any]:
    return case.make(torch.bfloat16, DEVICE, torch.Generator(DEVICE).manual_seed(0))


def proofs_at_size() -> list[CheckResult]:
    """The Triton delta rule against the reference in fp64, by root mean square, at the sizes that are timed."""
    variant = KERNEL_REGISTRY.op(DELTA).variant("standard")
    kernel = KERNEL_REGISTRY.load(DELTA, "standard", "triton")
    results = []
    for case in timed_cases():
        label = CheckResult(DELTA, "standard", "triton", case.name, "bfloat16")
        results.append(compare(kernel, expect(variant, drawn(case)), label, by_norm=True))
        torch.cuda.empty_cache()
    return results


def plan_times() -> list[dict[str, Any]]:
    """Forward plus backward of the Triton delta rule with the plan it has and with one part of it changed."""
    from opslot.ops.chunk_gated_delta_rule.kernels import call

    kernel = KERNEL_REGISTRY.load(DELTA, "standard", "triton")
    variant = KERNEL_REGISTRY.op(DELTA).variant("standard")
    default = call.plan_for
    usual = default(128, 128, 2)
    changes = [
        {},
        *({"state_block": n} for n in (16, 64)),
        *({"stages": n} for n in (1, 3)),
        {"key_block": 128},
        {"value_block": 128},
        {"key_block": 128, "value_block": 128},
        {"grad_block": 64},
        {"key_block": 32},
    ]
    found = []
    for case in timed_cases():
        arguments = drawn(case)
        for change in changes:
            plan = replace(usual, **change)
            call.plan_for = lambda *_, plan=plan: plan  # type: ignore[assignment]
            try:
                time, _ = time_both_ways(kernel, variant, arguments, DEVICE)
                row = {"case": case.name, "change": change, "ms": time.ms, "alone_ms": time.alone_ms}
            except Exception as error:
                row = {"case": case.name, "change": change, "error": f"{type(error).__name__}: {str(error)[:120]}"}
            found.append(row)
            print(row, flush=True)
        call.plan_for = default
        found += kernel_times(case, arguments)
    return found


def kernel_times(case: InputCase, arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """Device time of each kernel in one forward and backward pass, by torch's profiler."""
    variant = KERNEL_REGISTRY.op(DELTA).variant("standard")
    kernel = KERNEL_REGISTRY.load(DELTA, "standard", "triton")
    call = {n: t.requires_grad_() if n in variant.differentiable else t for n, t in arguments.items()}
    leaves = [call[n] for n in variant.differentiable]
    dout = torch.randn_like(call["value"])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        torch.autograd.grad(kernel(**call)[0], leaves, dout)
        torch.cuda.synchronize()
    found = [
        {"case": case.name, "kernel": event.key, "calls": event.count, "us": event.self_device_time_total}
        for event in profile.key_averages()
    ]
    found.sort(key=lambda row: -row["us"])
    for row in found:
        print(row, flush=True)
    return found


def table(rows: list[BenchRow]) -> str:
    body = [
        (
            row.op,
            row.case,
            row.kernel,
            "-" if row.ms is None else f"{row.ms:.3f}",
            "-" if row.alone_ms is None else f"{row.alone_ms:.3f}",
            "-" if row.share is None else f"{row.share:.0%}",
            "-" if row.peak_mib is None else f"{row.peak_mib:.0f}",
            row.verdict,
        )
        for row in rows
    ]
    return "\n".join(format_table(("op", "case", "kernel", "ms", "alone", "of floor", "peak MiB", "check"), body))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--commit", help="of the code that runs, where there is no git")
    parser.add_argument("--op", choices=OPS, nargs="+", default=OPS)
    parser.add_argument("--plans", action="store_true", help="time the Triton delta rule cut in other ways, too")
    parser.add_argument(
        "--without", nargs="*", default=[], metavar="KERNEL", help="leave these out, as fla, which tunes itself"
    )
    options = parser.parse_args()
    for op in options.op:
        for kernel in options.without:
            KERNEL_REGISTRY.unregister(op, "standard", kernel)
    rows: list[BenchRow] = []
    for op in options.op:
        rows += [*bench([op], device=DEVICE, compiled=False), *upstream_rows(op)]
        print(table(rows), flush=True)
    proofs = [str(result) for result in proofs_at_size()] if DELTA in options.op else []
    print("\n".join(proofs), flush=True)
    plans = plan_times() if options.plans else []
    if options.output:
        here = environment(DEVICE) | ({"commit": options.commit} if options.commit else {})
        found = {"environment": here, "rows": [as_dict(row) for row in rows], "proofs": proofs, "plans": plans}
        options.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
