"""rms_norm, rotary_pos_emb, swiglu_mlp and load_balancing_loss on a GPU: proof in three dtypes, then times in bf16.

    python benchmarks/gpu_elementwise.py [--output FILE --commit HASH] [--only rms_norm/residual ...] [--skip-proof]

Beside opslot's kernels stand eager, torch.compile of eager where a goal is set, and Liger-Kernel as its users call it
(in place, where opslot's `liger_kernel` works on copies). Three times of forward plus backward:

- "kernels": replays of a CUDA graph of the step, which is what it adds to a training step that keeps the GPU busy.
- "alone": a loop that runs nothing else, events around each step and a write that fills the cache between steps, as
  triton.testing.do_bench measures. Python and autograd count where they take longer than the write hides.
- "host": microseconds of CPU time a step, from a loop on a few rows that never waits for the GPU.

Shares are of "kernels". A kernel whose proof fails, or that differs from the reference on the timed input, shows WRONG
instead of numbers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from opslot import KERNEL_REGISTRY
from opslot._base.device import facts_of
from opslot._base.errors import KernelError
from opslot.bench import environment
from opslot.slots import InputCase, KernelRequest, OpVariant, format_table
from opslot.verify import check_kernel

OPS = ("rms_norm", "rotary_pos_emb", "swiglu_mlp", "load_balancing_loss")
DTYPES = (torch.bfloat16, torch.float32, torch.float16)
DEVICE = torch.device("cuda")
PARTS = 3
# Milliseconds; docs/performance.md. torch.compile, slow to compile, is measured beside them alone.
GOALS = {
    ("rms_norm/standard", "16384x4096"): 0.18,
    ("rms_norm/standard", "16384x2048"): 0.11,
    ("rms_norm/standard", "524288x128"): 0.18,
    ("rotary_pos_emb/full", "16384 tokens, 32 and 8 heads of 128"): 0.18,
    ("swiglu_mlp/standard", "16384x12288"): 0.75,
    ("swiglu_mlp/standard", "16384x768"): 0.07,
    ("load_balancing_loss/standard", "48 layers x 16384 x 128, top 8"): 0.6,
}
Kernel = Callable[..., Any]


def liger_peers() -> dict[str, Kernel]:
    """Liger-Kernel's own entry points, by op and variant, in the op's signature."""
    try:
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction
        from liger_kernel.ops.rope import LigerRopeFunction
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction
    except ImportError:
        return {}
    return {
        "rms_norm/standard": lambda hidden_states, weight, eps: LigerRMSNormFunction.apply(hidden_states, weight, eps),
        "rms_norm/offset": lambda hidden_states, weight, eps: LigerRMSNormFunction.apply(
            hidden_states, weight, eps, 1.0, "gemma"
        ),
        "rotary_pos_emb/full": lambda q, k, cos, sin: LigerRopeFunction.apply(q, k, cos, sin),
        "swiglu_mlp/standard": lambda gate, up: LigerSiLUMulFunction.apply(gate, up),
    }


def usable(only: list[str]) -> list[tuple[str, str, str]]:
    request = {"device": facts_of(DEVICE), "dtype": torch.bfloat16}
    return [
        spec.key
        for op in OPS
        for spec in KERNEL_REGISTRY.specs(op)
        if spec.unsupported(KernelRequest(op, spec.variant, **request)) is None
        and (not only or f"{op}/{spec.variant}" in only)
    ]


def prove(job: tuple[str, str, str, torch.dtype | None, int]) -> tuple[list[str], int]:
    """Failures of one kernel in one dtype on a part of the cases, and how many passed.

    Without a dtype: only compile what will be timed, which is kept on disk.
    """
    op, variant_name, name, dtype, part = job
    variant = KERNEL_REGISTRY.op(op).variant(variant_name)
    try:
        kernel = KERNEL_REGISTRY.load(op, variant_name, name)
        if dtype is None:
            for case in (c for c in variant.cases if c.role == "bench"):
                Step(kernel, variant, few_rows(case), torch.bfloat16)()
            return [], 0
    except Exception as error:
        return [f"{type(error).__name__}: {str(error)[:200]}"], 0
    checks = [c for c in variant.cases if c.role == "check"][part::PARTS]
    results = [check_kernel(kernel, op, variant, case, dtype, DEVICE, name=name) for case in checks]
    return [str(r) for r in results if not r.ok], sum(r.ok and not r.unsupported for r in results)


def proofs(keys: list[tuple[str, str, str]]) -> tuple[dict[str, list[str]], dict[str, int]]:
    """Failures and numbers of passed cases by kernel; in many processes, since compiling is what takes the time."""
    jobs = [(*key, dtype, part) for key in keys for dtype in DTYPES for part in range(PARTS)]
    jobs = [(*key, None, 0) for key in keys] + jobs
    # The slowest to compile first.
    jobs.sort(key=lambda job: job[2] != "quack")
    failures: dict[str, list[str]] = {}
    passed: dict[str, int] = {}
    with ProcessPoolExecutor(14, mp_context=get_context("spawn")) as pool:
        for job, (found, count) in zip(jobs, pool.map(prove, jobs), strict=True):
            label = "/".join(job[:3])
            failures.setdefault(label, []).extend(found)
            passed[label] = passed.get(label, 0) + count
    return failures, passed


class Step:
    """Forward plus backward of a kernel on one input, with random incoming gradients."""

    def __init__(self, kernel: Kernel, variant: OpVariant, arguments: dict[str, Any], dtype: torch.dtype) -> None:
        def own(name: str, value: Any) -> Any:
            if not isinstance(value, Tensor) or not value.is_floating_point():
                return value
            # A copy with the same strides: some peers write over their arguments.
            copied = torch.empty_strided(value.shape, value.stride(), dtype=dtype, device=DEVICE).copy_(value)
            return copied.requires_grad_(name in variant.differentiable)

        self.kernel = kernel
        self.arguments = {n: tree_map(lambda v, n=n: own(n, v), value) for n, value in arguments.items()}
        self.leaves = [t for n in variant.differentiable for t in tree_leaves(self.arguments[n])]
        self.douts: list[Tensor] = []

    def __call__(self) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        outs = self.kernel(**self.arguments)
        outs = list(outs) if isinstance(outs, tuple) else [outs]
        if not self.douts:
            generator = torch.Generator(device=DEVICE).manual_seed(1)
            self.douts = [torch.randn(o.shape, device=DEVICE, generator=generator).bfloat16().to(o) for o in outs]
        return outs, torch.autograd.grad(outs, self.leaves, self.douts)


def agrees(step: Step, variant: OpVariant, arguments: dict[str, Any]) -> bool:
    """Whether outputs and gradients on the timed input are within 1 % of the reference's in fp32, by norm."""
    expected = tree_leaves(Step(variant.reference, variant, arguments, torch.float32)())
    pairs = zip(tree_leaves(step()), expected, strict=True)
    return all(bool((got.float() - want).norm() <= 1e-2 * want.norm()) for got, want in pairs)


def median_ms(step: Callable[[], Any], repeat: int) -> float:
    """Median of events around each step, each after a write of 256 MiB, larger than the cache."""
    flush = torch.empty(2**26, dtype=torch.int32, device=DEVICE)
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeat)]
    for start, stop in marks:
        flush.zero_()
        start.record()
        step()
        stop.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(stop) for start, stop in marks)


def graph_ms(step: Step, repeat: int) -> float | None:
    """Median of replays of the step's CUDA graph; None if it cannot be captured."""
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
    return median_ms(graph.replay, repeat)


def host_us(step: Step) -> float:
    """CPU time of a step on an input so small that the GPU is never waited for."""
    for _ in range(20):
        step()
    torch.cuda.synchronize()
    best = float("inf")
    for _ in range(5):
        begun = time.perf_counter()
        for _ in range(40):
            step()
        best = min(best, (time.perf_counter() - begun) / 40)
        torch.cuda.synchronize()
    return 1e6 * best


def few_rows(case: InputCase) -> dict[str, Any]:
    """The arguments of a case cut to a few rows of tokens, which lie as the whole does."""
    arguments = case.make(torch.bfloat16, DEVICE, torch.Generator(device=DEVICE).manual_seed(0))
    if "q" in arguments:
        cut = {n: arguments[n].transpose(-3, -2)[..., :4, :, :].transpose(-3, -2) for n in ("q", "k")}
        if arguments["q"].ndim == 3:
            cut = {n: arguments[n][:4] for n in ("q", "k")}
        return arguments | cut | {n: arguments[n][..., :4, :] for n in ("cos", "sin")}
    if "gate_logits" in arguments:
        arguments["gate_logits"] = tuple(x[:16] for x in arguments["gate_logits"])
        return arguments | (
            {"attention_mask": arguments["attention_mask"][:2, :8]} if "attention_mask" in arguments else {}
        )
    return {n: v[:16] if isinstance(v, Tensor) and v.ndim > 1 else v for n, v in arguments.items()}


def timed(kernel: Kernel, variant: OpVariant, case: InputCase, red: list[str], repeat: int) -> dict[str, Any]:
    empty = {"kernels_ms": None, "alone_ms": None, "host_us": None, "peak_mib": None}
    try:
        arguments = case.make(torch.bfloat16, DEVICE, torch.Generator(device=DEVICE).manual_seed(0))
        step = Step(kernel, variant, arguments, torch.bfloat16)
        if not red and not agrees(step, variant, arguments):
            red = ["differs from the reference on the timed input"]
        if red:
            return empty | {"check": f"WRONG {red[0]}"}
        del arguments
        torch.cuda.empty_cache()
        alone = median_ms(step, repeat)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        peak = (torch.cuda.max_memory_allocated() - before) / 2**20
        small = Step(kernel, variant, few_rows(case), torch.bfloat16)
        found = {"alone_ms": alone, "host_us": host_us(small), "peak_mib": peak, "check": "ok"}
        return empty | found | {"kernels_ms": graph_ms(step, repeat)}
    except Exception as error:
        return empty | {"check": f"{type(error).__name__}: {str(error)[:80]}"}
    finally:
        torch.cuda.empty_cache()


def copy_bytes_per_s() -> float:
    source = torch.randn(2**28, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * 4 * 2**28 / median_ms(lambda: target.copy_(source), 20) * 1e3


def loaded(op: str, variant: str, name: str) -> Kernel:
    """The kernel, or a stand-in that raises what loading it raised."""
    try:
        return KERNEL_REGISTRY.load(op, variant, name)
    except KernelError as error:
        problem = error

    def missing(**arguments: Any) -> Any:
        raise problem

    return missing


def rows(failures: dict[str, list[str]], only: list[str], repeat: int, bandwidth: float) -> Iterator[dict[str, Any]]:
    peers, kernels = liger_peers(), usable(only)
    for op in OPS:
        for variant in KERNEL_REGISTRY.op(op).variants.values():
            label = f"{op}/{variant.name}"
            if only and label not in only:
                continue
            candidates: dict[str, Kernel] = {"eager": variant.reference}
            if label in peers:
                candidates["Liger itself"] = peers[label]
            names = [key[2] for key in kernels if key[:2] == (op, variant.name)]
            candidates |= {name: loaded(op, variant.name, name) for name in names}
            for case in (c for c in variant.cases if c.role == "bench"):
                goal = GOALS.get((label, case.name))
                compiled = {"torch.compile": torch.compile(variant.reference, dynamic=False)} if goal else {}
                if op == "load_balancing_loss":
                    compiled = {}
                sized = case.make(torch.bfloat16, DEVICE, torch.Generator(device=DEVICE).manual_seed(0))
                assert variant.cost is not None
                floor = 1e3 * variant.cost(sized).bytes / bandwidth
                del sized
                for name, kernel in (candidates | compiled).items():
                    row = {"op": label, "case": case.name, "kernel": name, "goal_ms": goal, "floor_ms": floor}
                    yield row | timed(kernel, variant, case, failures.get(f"{label}/{name}", []), repeat)


def table(found: list[dict[str, Any]]) -> str:
    def number(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    body = [
        (
            r["op"],
            r["case"],
            r["kernel"],
            number(r["kernels_ms"], ".3f"),
            number(r["alone_ms"], ".3f"),
            number(r["host_us"], ".0f"),
            number(r["goal_ms"], ".2f"),
            number(r["floor_ms"], ".3f"),
            number(r["floor_ms"] / r["kernels_ms"] if r["kernels_ms"] else None, ".0%"),
            number(r["peak_mib"], ".0f"),
            r["check"],
        )
        for r in found
    ]
    header = ("op", "case", "kernel", "kernels", "alone", "host us", "goal", "floor", "share", "MiB", "check")
    return "\n".join(format_table(header, body))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--commit", help="of the code measured, where there is no git")
    parser.add_argument("--only", nargs="*", default=[], help="op/variant")
    parser.add_argument("--skip-proof", action="store_true", help="time without proving the check cases first")
    parser.add_argument("--repeat", type=int, default=30)
    options = parser.parse_args()
    begun = time.perf_counter()
    failures, passed = ({}, {}) if options.skip_proof else proofs(usable(options.only))
    for label, failed in failures.items():
        print(f"{label}: {passed[label]} cases right" + "".join(f"\n  WRONG {line}" for line in failed))
    print(f"proofs took {time.perf_counter() - begun:.0f} s", flush=True)
    bandwidth = copy_bytes_per_s()
    found = []

    def save() -> None:
        if options.output:
            result = {
                "environment": environment(DEVICE) | ({"commit": options.commit} if options.commit else {}),
                "bytes_per_s": bandwidth,
                "proven": {label: failed or passed[label] for label, failed in failures.items()},
                "rows": found,
            }
            options.output.write_text(json.dumps(result, indent=1) + "\n")

    for row in rows(failures, options.only, options.repeat, bandwidth):
        found.append(row)
        save()
    print(table(found))
    print(f"{time.perf_counter() - begun:.0f} s in all")


if __name__ == "__main__":
    main()
