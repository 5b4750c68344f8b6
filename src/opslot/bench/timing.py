"""Time a piece of work on a device, and measure the device's peak bandwidth and FLOP/s."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

# Seconds that the repetitions of one measurement may take.
_BUDGET = 0.4
_MOST, _FEWEST = 30, 3


@dataclass(frozen=True)
class Time:
    """Median milliseconds of one piece of work.

    Attributes:
        ms: on the device, with the host running ahead, as in a training step that keeps the device busy. On a CPU the
            time it takes.
        wall_ms: in a loop that does nothing else, host time included: what users of a single op see.
    """

    ms: float
    wall_ms: float


@dataclass(frozen=True)
class Peak:
    """What this machine reaches: bytes/s of a large copy or addition, and FLOP/s of a large GEMM."""

    bytes_per_s: float
    flops_per_s: float


@functools.cache
def measure_peak(device: torch.device, dtype: torch.dtype) -> Peak:
    """Measured on random data, since zeros take less power and run faster."""
    n, size = (2**28, 8192) if device.type == "cuda" else (2**24, 1024)
    return Peak(_bytes_per_s(n, device), 2 * size**3 / _gemm_ms(size, device, dtype) * 1e3)


def _bytes_per_s(n: int, device: torch.device) -> float:
    """The larger of a copy's and an addition's: most ops read more than they write, which can be faster than a copy."""
    x, y = (torch.randn(n, device=device) for _ in range(2))
    out = torch.empty_like(x)
    copy, add = measure(lambda: out.copy_(x), device).ms, measure(lambda: torch.add(x, y, out=out), device).ms
    return x.element_size() * n * max(2 / copy, 3 / add) * 1e3


def _gemm_ms(size: int, device: torch.device, dtype: torch.dtype) -> float:
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return measure(lambda: a @ b, device).ms


class _CpuMark:
    """A point in time, with the interface of a CUDA event."""

    def record(self) -> None:
        self._seconds = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: _CpuMark) -> float:
        return (end._seconds - self._seconds) * 1e3


def mark(on_gpu: bool) -> Any:
    """Now, as a recorded event: of the GPU, or of the host."""
    event = torch.cuda.Event(enable_timing=True) if on_gpu else _CpuMark()
    event.record()
    return event


def measure(step: Callable[[], Any], device: torch.device) -> Time:
    """Median time of `step`, warm, with inputs that are not in the device's cache."""
    for _ in range(2):
        step()
    if device.type == "cuda":
        return _measure_cuda(step)
    ms = median_cpu(step, _repeats(median_cpu(step, 1) / 1e3))
    return Time(ms, ms)


def median_cpu(step: Callable[[], Any], repeat: int) -> float:
    """Median milliseconds of `repeat` calls."""
    seconds = []
    for _ in range(repeat):
        begun = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begun)
    return 1e3 * statistics.median(seconds)


def _repeats(seconds: float) -> int:
    return max(_FEWEST, min(_MOST, int(_BUDGET / max(seconds, 1e-9))))


def _measure_cuda(step: Callable[[], Any]) -> Time:
    torch.cuda.synchronize()
    begun = time.perf_counter()
    step()
    host = time.perf_counter() - begun
    torch.cuda.synchronize()
    repeat = _repeats(time.perf_counter() - begun)
    flush = torch.empty(2**26, dtype=torch.int32, device="cuda")
    flush_ms = _median_cuda(lambda: None, lambda: flush.zero_(), 5)
    # The device overwrites its cache for at least as long as the host takes to launch a step, so that the events
    # around the step measure the device alone. A step that synchronizes by itself keeps its own time.
    covers = max(1, min(60, int(2e3 * host / flush_ms) + 1))

    def cover() -> None:
        for _ in range(covers):
            flush.zero_()

    return Time(_median_cuda(cover, step, repeat), _median_cuda(flush.zero_, step, repeat))


def _median_cuda(before: Callable[[], Any], step: Callable[[], Any], repeat: int) -> float:
    marks = []
    for _ in range(repeat):
        before()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        stop.record()
        marks.append((start, stop))
        # One step in flight at a time: otherwise the host runs ahead and its time does not show.
        torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in marks)
