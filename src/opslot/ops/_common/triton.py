"""What the Triton kernels of several ops share."""

from __future__ import annotations

import functools
import operator
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

    `kernel[grid](...)` works out anew on every call which compiled form its arguments need, in 20 us of CPU time on the
    H200's host, where the compiled form launches in 8: at [16384, 2048] RMSNorm is bound by this. Here the form is
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
        tensors: tuple[Tensor | tuple[Tensor, ...] | None, ...],
        strides: tuple[int, ...],
        scalars: tuple[float, ...],
        constants: tuple[Any, ...],
        warps: int,
    ) -> None:
        """Launch on the device of the first tensor.

        Args:
            tensors: one a pointer; None where a constant says that there is none, and for a parameter that is a tuple
                of pointers as many tensors, alike in dtype and device, as a constant says.
        """
        if not self._direct:
            self._kernel[grid](*tensors, *strides, *scalars, *constants, num_warps=warps)
            return
        first = tensors[0]
        index = (first[0] if isinstance(first, tuple) else first).get_device()  # type: ignore[union-attr]
        if index != torch.cuda.current_device():
            with torch.cuda.device(index):
                self(grid, tensors, strides, scalars, constants, warps)
            return
        sizes = 0
        for stride in strides:
            sizes |= stride
        bits = sizes
        addresses: list[int | tuple[int, ...] | None] = []
        key: list[Any] = [index, warps, *constants]
        for tensor in tensors:
            if tensor is None:
                addresses.append(None)
                continue
            if isinstance(tensor, tuple):
                several = tuple([one.data_ptr() for one in tensor])
                bits |= functools.reduce(operator.or_, several)
                addresses.append(several)
                tensor = tensor[0]
            else:
                address = tensor.data_ptr()
                bits |= address
                addresses.append(address)
            key.append(tensor.dtype)
            if tensor.get_device() != index:
                # Triton's own way says what is wrong, where an address of other memory would not.
                bits |= 1
        for scalar in scalars:
            if type(scalar) is int:
                sizes |= scalar
        # 16: what Triton specializes on; 31: where its integers become 64 bits wide.
        if bits & 15 or sizes >> 31:
            self._kernel[grid](*tensors, *strides, *scalars, *constants, num_warps=warps)
            return
        form = tuple(key)
        compiled = self._compiled.get(form)
        if compiled is None:
            self._compiled[form] = self._kernel[grid](*tensors, *strides, *scalars, *constants, num_warps=warps)
        else:
            # Addresses instead of tensors: of each tensor the driver would ask CUDA what memory it is.
            compiled[grid](*addresses, *strides, *scalars, *constants)
