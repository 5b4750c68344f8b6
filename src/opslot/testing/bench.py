"""Time kernels against each other and against the floor, generic over the ops' own input cases.

The floor is the larger of bytes over the measured copy bandwidth and FLOPs over the measured rate of a large matrix
product, both of this machine. A number stands only beside a check that passed: a kernel whose check fails shows WRONG.
"""

from __future__ import annotations

import functools
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from opslot._base.device import facts_of, package_version
from opslot.slots import KERNEL_REGISTRY, InputCase, KernelRequest, OpVariant
from opslot.testing.parity import check_kernel


@dataclass(frozen=True)
class BenchRow:
    """One implementation on one case, forward plus backward.

    Attributes:
        ms: median milliseconds; None when it failed.
        floor_ms: the least this machine could need; None where the op declares no cost.
        peak_mib: memory allocated above the inputs at the peak; None off CUDA.
        verdict: "ok", or what is wrong; a number beside anything but "ok" does not count.
    """

    op: str
    variant: str
    case: str
    kernel: str
    dtype: str
    ms: float | None
    floor_ms: float | None
    peak_mib: float | None
    verdict: str

    @property
    def share(self) -> float | None:
        """Floor over time: 1.0 is as fast as the machine can be."""
        return self.floor_ms / self.ms if self.ms and self.floor_ms else None


@dataclass(frozen=True)
class Ceilings:
    """What this machine reaches: bytes/s of a large copy (read + write) and FLOP/s of a large product."""

    bytes_per_s: float
    flops_per_s: float


@functools.cache
def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Measured on random data: zeros run faster than real numbers."""
    n = 2**28 if device.type == "cuda" else 2**24
    source = torch.randn(n, device=device)
    target = torch.empty_like(source)
    copy_ms = _median_ms(lambda: target.copy_(source), device, 20)
    size = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    product_ms = _median_ms(lambda: a @ b, device, 10)
    return Ceilings(2 * 4 * n / copy_ms * 1e3, 2 * size**3 / product_ms * 1e3)


def bench(
    op: str | None = None,
    *,
    device: torch.device | str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    compiled: bool = True,
    check: bool = True,
    repeat: int = 20,
) -> Iterator[BenchRow]:
    """Time eager, torch.compile of eager, and every usable kernel on each op's bench cases.

    Args:
        op: only this op; default all.
        check: also prove each kernel on the op's check cases in `dtype` first (once per kernel).

    Yields:
        One row per (case, implementation), in the order measured.
    """
    device = torch.device(device)
    ops = [KERNEL_REGISTRY.op(op)] if op else list(KERNEL_REGISTRY.ops.values())
    for spec_op in ops:
        for variant in spec_op.variants.values():
            candidates = _candidates(spec_op.name, variant, device, dtype, compiled)
            verdicts = {n: _verdict(spec_op.name, variant, n, k, device, dtype, check) for n, k in candidates.items()}
            for case in variant.cases:
                if case.role == "bench":
                    for name, kernel in candidates.items():
                        yield _time(spec_op.name, variant, case, name, kernel, device, dtype, verdicts[name], repeat)


def _candidates(
    op_name: str, variant: OpVariant, device: torch.device, dtype: torch.dtype, compiled: bool
) -> dict[str, Callable[..., Any]]:
    found: dict[str, Callable[..., Any]] = {"eager": variant.reference}
    if compiled:
        found["torch.compile"] = torch.compile(variant.reference, dynamic=False)
    request = KernelRequest(op_name, variant.name, facts_of(device), dtype)
    for spec in KERNEL_REGISTRY.specs(op_name, variant.name):
        if spec.unusable(request) is None:
            found[spec.name] = KERNEL_REGISTRY.load(*spec.key)
    return found


def _verdict(
    op_name: str,
    variant: OpVariant,
    name: str,
    kernel: Callable[..., Any],
    device: torch.device,
    dtype: torch.dtype,
    check: bool,
) -> str:
    if not check or name in ("eager", "torch.compile"):
        return "ok"
    for case in variant.cases:
        if case.role == "check":
            result = check_kernel(kernel, op_name, variant, case, dtype, device, name=name)
            if not result.ok:
                return f"WRONG {result}"
    return "ok"


def _time(
    op_name: str,
    variant: OpVariant,
    case: InputCase,
    name: str,
    kernel: Callable[..., Any],
    device: torch.device,
    dtype: torch.dtype,
    verdict: str,
    repeat: int,
) -> BenchRow:
    generator = torch.Generator(device=device).manual_seed(0)
    arguments = case.make(dtype, device, generator)
    floor = _floor_ms(variant, arguments, device, dtype)
    label = (op_name, variant.name, case.name, name, str(dtype).removeprefix("torch."))
    try:
        ms, peak = _forward_backward(kernel, variant, arguments, device, repeat)
    except Exception as error:
        return BenchRow(*label, None, floor, None, f"{type(error).__name__}: {str(error).splitlines()[0][:100]}")
    return BenchRow(*label, ms, floor, peak, verdict)


def _floor_ms(variant: OpVariant, arguments: dict[str, Any], device: torch.device, dtype: torch.dtype) -> float | None:
    if variant.cost is None:
        return None
    cost, ceilings = variant.cost(arguments), measure_ceilings(device, dtype)
    return 1e3 * max(cost.bytes / ceilings.bytes_per_s, cost.flops / ceilings.flops_per_s)


def _forward_backward(
    kernel: Callable[..., Any], variant: OpVariant, arguments: dict[str, Any], device: torch.device, repeat: int
) -> tuple[float, float | None]:
    leaves: list[Tensor] = []

    def leaf(x: Any) -> Any:
        if isinstance(x, Tensor) and x.dtype.is_floating_point:
            x = x.detach().requires_grad_()
            leaves.append(x)
        return x

    call = {n: tree_map(leaf, v) if n in variant.differentiable else v for n, v in arguments.items()}
    grads: list[Tensor] = []

    def step() -> None:
        outputs = [o for o in tree_flatten(kernel(**call))[0] if isinstance(o, Tensor) and o.requires_grad]
        if not grads:
            grads.extend(torch.randn_like(o) for o in outputs)
        if outputs:
            torch.autograd.grad(outputs, leaves, grads, allow_unused=True)

    step()
    ms = _median_ms(step, device, repeat)
    if device.type != "cuda":
        return ms, None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return ms, (torch.cuda.max_memory_allocated() - before) / 2**20


def _median_ms(step: Callable[[], Any], device: torch.device, repeat: int) -> float:
    for _ in range(3):
        step()
    if device.type == "cuda":
        # Written between runs, so that inputs smaller than the cache are read from memory every time.
        flush = torch.empty(2**26, dtype=torch.int32, device=device)
        times = []
        for _ in range(repeat):
            flush.zero_()
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            step()
            stop.record()
            times.append((start, stop))
        torch.cuda.synchronize()
        return statistics.median(a.elapsed_time(b) for a, b in times)
    seconds = []
    for _ in range(repeat):
        begin = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(seconds)


def environment(device: torch.device | str) -> dict[str, Any]:
    """Machine, versions and commit that a committed result carries."""
    packages = (
        "torch",
        "transformers",
        "triton",
        "liger-kernel",
        "quack-kernels",
        "flash-attn-4",
        "fla-core",
        "veomni",
    )
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    return {
        "device": str(facts_of(device)),
        "cpu": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": {p: v for p in packages if (v := package_version(p))},
        "commit": commit,
        "date": time.strftime("%Y-%m-%d"),
    }


def as_dict(row: BenchRow) -> dict[str, Any]:
    """A row as plain data, with its share of the floor."""
    return {**asdict(row), "share_of_floor": row.share}
