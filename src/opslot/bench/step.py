"""A training step of a whole model: its time, its memory and its losses."""

from __future__ import annotations

import itertools
import statistics
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

WARM_UP = 3


@torch.no_grad()
def draw_weights(model: nn.Module, seed: int, std: float) -> None:
    """Give every parameter numbers that depend on its name alone, so that every contender starts from the same model.

    Vectors named "weight" are norms' and become 1, biases 0, all others normal with `std`.
    """
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.fill_(1.0 if name.endswith("weight") else 0.0)
        else:
            device = parameter.device
            # torch.compile wraps a model in a module of that name.
            plain = name.removeprefix("_orig_mod.")
            generator = torch.Generator(device).manual_seed(seed + zlib.crc32(plain.encode()))
            parameter.normal_(0.0, std, generator=generator)


def measure_steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch_at: Callable[[int], Tensor],
    steps: int,
    device: torch.device,
) -> dict[str, Any]:
    """Train for `WARM_UP` steps and `steps` more.

    Args:
        batch_at: token ids [B, S] of a step, counted from 0.

    Returns:
        ms: median of the steps after the warm-up. On a GPU the host runs ahead, as it does in training, and events
            say when each step was done.
        tokens_per_s: of that.
        peak_gib: at the peak of the steps after the warm-up; None off CUDA.
        losses: of every step.
    """
    losses: list[Tensor] = []

    def step() -> None:
        ids = batch_at(len(losses))
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())

    for _ in range(WARM_UP):
        step()
    timed = _time_cuda if device.type == "cuda" else _time_cpu
    ms, peak = timed(step, steps)
    values = torch.stack([x.float() for x in losses]).tolist()
    tokens = batch_at(0).numel()
    return {"ms": ms, "tokens_per_s": tokens / ms * 1e3, "peak_gib": peak, "losses": values}


def _time_cuda(step: Callable[[], None], steps: int) -> tuple[float, float | None]:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize()
    ms = statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(marks))
    return ms, torch.cuda.max_memory_allocated() / 2**30


def _time_cpu(step: Callable[[], None], steps: int) -> tuple[float, float | None]:
    seconds = []
    for _ in range(steps):
        begun = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begun)
    return 1e3 * statistics.median(seconds), None


def compare_curves(reference: Sequence[float], other: Sequence[float]) -> dict[str, float]:
    """How far two loss curves of the same batches are apart, in nats a token: at most, on average, and at the end."""
    apart = [abs(a - b) for a, b in zip(reference, other, strict=True)]
    return {"largest": max(apart), "mean": statistics.fmean(apart), "last": apart[-1]}
