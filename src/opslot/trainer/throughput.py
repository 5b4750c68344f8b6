"""Throughput of a step: tokens/s, TFLOP/s, MFU and the time spent waiting for data and for the device."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch

from opslot._base.device import facts_of, peak_bf16_tflops
from opslot.models.flops import FlopCounter, audio_lengths, document_lengths, image_lengths
from opslot.trainer.config import TrainConfig
from opslot.trainer.setup import dtype_of

_HALF = (torch.bfloat16, torch.float16)


class StepMeter:
    """Measures the steps of one rank.

    Attributes:
        flops: counts the FLOPs of a step.
        peak_tflops: of one device; None where it is unknown.
    """

    def __init__(self, model: Any, train: TrainConfig, device: torch.device, world_size: int) -> None:
        self.flops = FlopCounter(model)
        self.world_size = world_size
        self.peak_tflops = train.logging.peak_tflops
        weights = next(p.dtype for p in model.parameters() if p.dtype.is_floating_point)
        if self.peak_tflops is None and (dtype_of(train.fsdp.param_dtype) or weights) in _HALF:
            self.peak_tflops = peak_bf16_tflops(facts_of(device).name)
        self.start()

    def uncounted_lines(self) -> list[str]:
        """A line for each kind of module whose FLOPs are missing in the measurements."""
        first: dict[str, str] = {}
        for part in self.flops.uncounted:
            first.setdefault(part.reason, part.path or "model")
        return [f"not in TFLOP/s and MFU: {path}: {reason}" for reason, path in first.items()]

    def start(self) -> None:
        """Begin a step."""
        self._started = time.perf_counter()
        self._waited = {"data": 0.0, "device": 0.0}

    @contextlib.contextmanager
    def waiting_for(self, what: Literal["data", "device"]) -> Iterator[None]:
        """Count the time inside as time that the host waits for data, or for results of what it has launched."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._waited[what] += time.perf_counter() - began

    def count(self, micro_batches: Sequence[dict[str, Any]]) -> float:
        """FLOPs of micro batches, before they are divided over the ranks of one sequence."""
        lengths = [length for batch in micro_batches for length in document_lengths(batch)]
        patches = [length for batch in micro_batches for length in image_lengths(batch)]
        frames = [length for batch in micro_batches for length in audio_lengths(batch, self.flops.frames_dim)]
        return self.flops.count(lengths, patches=patches, frames=frames).total

    def measurements(self, tokens: int, flops: float) -> dict[str, Any]:
        """Fields of `StepRecord` for the step that ends now, from its tokens and FLOPs over all ranks."""
        seconds = time.perf_counter() - self._started
        tflops = flops / seconds / self.world_size / 1e12
        return {
            "tokens_per_s": tokens / seconds,
            "tokens_per_s_per_gpu": tokens / seconds / self.world_size,
            "tflops_per_gpu": tflops,
            "mfu": tflops / self.peak_tflops if self.peak_tflops else None,
            **{f"{what}_wait": waited / seconds for what, waited in self._waited.items()},
        }
