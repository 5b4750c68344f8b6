"""What the Triton kernels of several ops share."""

from __future__ import annotations

import functools

import torch


@functools.cache
def multiprocessor_count(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; 2 for the CPU interpreter, so that persistent grids have several programs."""
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count
