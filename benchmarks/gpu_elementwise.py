"""rms_norm, rotary_pos_emb and swiglu_mlp on a GPU: proof in three dtypes, then forward plus backward in bf16.

    python benchmarks/gpu_elementwise.py [--output FILE] [--skip-proof]

Beside opslot's kernels stand eager, torch.compile of eager, and the peers as their users call them: Liger-Kernel (in
place, where opslot's `liger_kernel` works on copies) and quack, where installed. Two times: "ms" is a loop that runs
the op alone, where Python and autograd often take longer than the kernels; "GPU ms" replays the same step from a CUDA
graph, which is what it adds to a training step that keeps the GPU busy. Shares are of "GPU ms". A kernel whose proof
fails, or that differs from the reference on the timed input, shows WRONG instead of numbers.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opslot import KERNEL_REGISTRY
from opslot._base.device import facts_of
from opslot.slots import KernelRequest, OpVariant, format_table
from opslot.testing import check_kernel
from opslot.testing.bench import _forward_backward, _median_ms, environment, measure_ceilings

OPS = ("rms_norm", "rotary_pos_emb", "swiglu_mlp")
DTYPES = (torch.bfloat16, torch.float32, torch.float16)
DEVICE = torch.device("cuda")


def liger_peers() -> dict[tuple[str, str], Callable[..., Any]]:
    """Liger-Kernel's own entry points, by (op, variant), in the op's signature."""
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    from liger_kernel.ops.rope import LigerRopeFunction
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return {
        ("rms_norm", "standard"): lambda hidden_states, weight, eps: LigerRMSNormFunction.apply(
            hidden_states, weight, eps
        ),
        ("rms_norm", "offset"): lambda hidden_states, weight, eps: LigerRMSNormFunction.apply(
            hidden_states, weight, eps, 1.0, "gemma"
        ),
        ("rotary_pos_emb", "full"): lambda q, k, cos, sin: LigerRopeFunction.apply(q, k, cos, sin),
        ("swiglu_mlp", "standard"): lambda gate, up: LigerSiLUMulFunction.apply(gate, up),
    }


def quack_peers() -> dict[tuple[str, str], Callable[..., Any]]:
    from quack.rmsnorm import rmsnorm

    return {("rms_norm", "standard"): lambda hidden_states, weight, eps: rmsnorm(hidden_states, weight, eps=eps)}


def peers(op: str, variant: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    for name, load in (("Liger itself", liger_peers), ("quack", quack_peers)):
        try:
            found = load().get((op, variant))
        except ImportError:
            continue
        if found is not None:
            yield name, found


def prove(job: tuple[str, str, str, torch.dtype]) -> list[str]:
    """Failures of one kernel in one dtype."""
    op, variant_name, name, dtype = job
    variant = KERNEL_REGISTRY.op(op).variant(variant_name)
    kernel = KERNEL_REGISTRY.load(op, variant_name, name)
    checks = [c for c in variant.cases if c.role == "check"]
    results = [check_kernel(kernel, op, variant, case, dtype, DEVICE, name=name) for case in checks]
    return [str(r) for r in results if not r.ok]


def usable() -> list[tuple[str, str, str]]:
    request = {"device": facts_of(DEVICE), "dtype": torch.bfloat16}
    return [
        spec.key
        for op in OPS
        for spec in KERNEL_REGISTRY.specs(op)
        if spec.unusable(KernelRequest(op, spec.variant, **request)) is None
    ]


def proofs() -> dict[tuple[str, str, str], list[str]]:
    """Failures by kernel; a process each, since compiling is what takes the time."""
    jobs = [(*key, dtype) for key in usable() for dtype in DTYPES]
    failures: dict[tuple[str, str, str], list[str]] = {}
    with ProcessPoolExecutor(12, mp_context=get_context("spawn")) as pool:
        for job, found in zip(jobs, pool.map(prove, jobs), strict=True):
            failures.setdefault(job[:3], []).extend(found)
    return failures


def agrees(kernel: Callable[..., Any], variant: OpVariant, arguments: dict[str, Any]) -> bool:
    """Whether outputs and gradients on the timed input are within 1 % of the reference's in fp32, by norm."""

    def results(function: Callable[..., Any], dtype: torch.dtype) -> list[Tensor]:
        call = {
            n: v.to(dtype, copy=True) if isinstance(v, Tensor) and v.is_floating_point() else v
            for n, v in arguments.items()
        }
        leaves = [call[n].requires_grad_() for n in variant.differentiable]
        outs = function(**call)
        outs = list(outs) if isinstance(outs, tuple) else [outs]
        generator = torch.Generator(device=DEVICE).manual_seed(1)
        douts = [torch.randn(o.shape, device=DEVICE, generator=generator).to(torch.bfloat16).to(o) for o in outs]
        return [o.detach() for o in outs] + list(torch.autograd.grad(outs, leaves, douts))

    pairs = zip(results(kernel, torch.bfloat16), results(variant.reference, torch.float32), strict=True)
    return all(bool((got.float() - want).norm() <= 1e-2 * want.norm()) for got, want in pairs)


def rows(failures: dict[tuple[str, str, str], list[str]], repeat: int) -> Iterator[dict[str, Any]]:
    ceilings = measure_ceilings(DEVICE, torch.bfloat16)
    for op in OPS:
        for variant in KERNEL_REGISTRY.op(op).variants.values():
            candidates = {"eager": variant.reference, "torch.compile": torch.compile(variant.reference, dynamic=False)}
            candidates |= dict(peers(op, variant.name))
            candidates |= {key[2]: KERNEL_REGISTRY.load(*key) for key in usable() if key[:2] == (op, variant.name)}
            for case in variant.cases:
                if case.role != "bench":
                    continue
                for name, kernel in candidates.items():
                    # Anew for each: some peers write over their arguments.
                    arguments = case.make(torch.bfloat16, DEVICE, torch.Generator(device=DEVICE).manual_seed(0))
                    assert variant.cost is not None
                    floor = 1e3 * variant.cost(arguments).bytes / ceilings.bytes_per_s
                    red = failures.get((op, variant.name, name), [])
                    yield {"op": f"{op}/{variant.name}", "case": case.name, "kernel": name, "floor_ms": floor} | timed(
                        kernel, variant, arguments, red, repeat
                    )


def timed(
    kernel: Callable[..., Any], variant: OpVariant, arguments: dict[str, Any], red: list[str], repeat: int
) -> dict[str, Any]:
    try:
        if not red and not agrees(kernel, variant, arguments):
            red = ["differs from the reference on the timed input"]
        gpu_ms = graph_ms(kernel, variant, arguments, repeat)
        ms, peak = _forward_backward(kernel, variant, arguments, DEVICE, repeat)
    except Exception as error:
        problem = f"{type(error).__name__}: {str(error)[:80]}"
        return {"ms": None, "gpu_ms": None, "peak_mib": None, "check": problem}
    if red:
        ms = gpu_ms = None
    return {"ms": ms, "gpu_ms": gpu_ms, "peak_mib": peak, "check": f"WRONG {red[0]}" if red else "ok"}


def graph_ms(kernel: Callable[..., Any], variant: OpVariant, arguments: dict[str, Any], repeat: int) -> float | None:
    """Median of replays of forward plus backward, each after a write that fills the cache; None if not capturable."""
    call = {
        n: v.detach().requires_grad_(n in variant.differentiable) if isinstance(v, Tensor) else v
        for n, v in arguments.items()
    }
    leaves = [call[n] for n in variant.differentiable]

    def step() -> None:
        outs = kernel(**call)
        outs = outs if isinstance(outs, tuple) else (outs,)
        if not douts:
            douts.extend(torch.randn_like(o) for o in outs)
        torch.autograd.grad(outs, leaves, douts)

    douts: list[Tensor] = []
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            step()
    except RuntimeError:
        return None
    return _median_ms(graph.replay, DEVICE, repeat)


def table(found: list[dict[str, Any]], bytes_per_s: float) -> str:
    body = []
    for r in found:
        ms, gpu_ms = r["ms"], r["gpu_ms"]
        share = r["floor_ms"] / gpu_ms if gpu_ms else None
        body.append(
            (
                r["op"],
                r["case"],
                r["kernel"],
                f"{ms:.3f}" if ms else "WRONG" if r["check"].startswith("WRONG") else "-",
                f"{gpu_ms:.3f}" if gpu_ms else "-",
                f"{share:.0%}" if share else "-",
                f"{share * bytes_per_s / 1e9:.0f}" if share else "-",
                f"{r['peak_mib']:.0f}" if r["peak_mib"] is not None else "-",
                r["check"],
            )
        )
    header = ("op", "case", "kernel", "ms", "GPU ms", "of floor", "GB/s", "peak MiB", "check")
    return "\n".join(format_table(header, body))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--skip-proof", action="store_true", help="time without proving the check cases first")
    parser.add_argument("--repeat", type=int, default=50)
    options = parser.parse_args()
    failures = {} if options.skip_proof else proofs()
    found = list(rows(failures, options.repeat))
    ceilings = measure_ceilings(DEVICE, torch.bfloat16)
    print(table(found, ceilings.bytes_per_s))
    for key, failed in failures.items():
        for line in failed:
            print("WRONG", *key, line)
    if options.output:
        result = {
            "environment": environment(DEVICE),
            "bytes_per_s": ceilings.bytes_per_s,
            "proven": {"/".join(key): not failed for key, failed in failures.items()},
            "rows": found,
        }
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
