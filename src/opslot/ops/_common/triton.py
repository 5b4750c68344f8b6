"""What the Triton kernels of several ops share."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from opslot._base.device import triton_interpreted


@functools.cache
def multiprocessor_count(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; 2 for the CPU interpreter, so that persistent grids have several programs."""
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


def cdiv(a: int, b: int) -> int:
    """a / b rounded up. Triton's own takes several microseconds on the host."""
    return -(-a // b)


class Launcher:
    """Launches a Triton kernel, straight through its compiled form once that is known.

    `kernel[grid](...)` works out anew on every call which compiled form its arguments need, in 14 us of CPU time on the
    H200's host, where the compiled form launches in 7: at [16384, 2048] RMSNorm is bound by this. Here the form is
    remembered by the tensors' dtypes and the constants, for arguments in the common class that Triton specializes on:
    pointers and strides divisible by 16. All others take Triton's own way.

    The kernel's parameters are in this order: pointers, strides, scalars that are not specialized on, constants.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._compiled: dict[tuple[Any, ...], Any] = {}
        self._direct = not triton_interpreted()

    def __call__(
        self,
        grid: tuple[int, int, int],
        tensors: tuple[Tensor | None, ...],
        strides: tuple[int, ...],
        scalars: tuple[float, ...],
        constants: tuple[Any, ...],
        warps: int,
    ) -> None:
        """Launch on the device of the first tensor. A tensor may be None where a constant says so."""
        if not self._direct:
            self._kernel[grid](*tensors, *strides, *scalars, *constants, num_warps=warps)
            return
        first = tensors[0]
        assert first is not None
        index = first.get_device()
        if index != torch.cuda.current_device():
            with torch.cuda.device(index):
                self(grid, tensors, strides, scalars, constants, warps)
            return
        sizes = 0
        for stride in strides:
            sizes |= stride
        bits = sizes
        dtypes = []
        for tensor in tensors:
            if tensor is not None:
                bits |= tensor.data_ptr()
                dtypes.append(tensor.dtype)
        for scalar in scalars:
            if type(scalar) is int:
                sizes |= scalar
        key = (index, *dtypes, *constants, warps)
        # 16: what Triton specializes on; 31: where its integers become 64 bits wide.
        compiled = self._compiled.get(key) if not bits & 15 and not sizes >> 31 else None
        if compiled is not None:
            compiled[grid](*tensors, *strides, *scalars, *constants)
            return
        compiled = self._kernel[grid](*tensors, *strides, *scalars, *constants, num_warps=warps)
        if not bits & 15 and not sizes >> 31:
            self._compiled[key] = compiled
