"""What the Triton kernels of several ops share."""

from __future__ import annotations

import functools
import operator
from typing import Any, NoReturn

import torch
from torch import Tensor

from opslot._base.device import triton_interpreted
from opslot.ops._common.arguments import reject


@functools.cache
def sm_count(device: torch.device) -> int:
    """SMs of a CUDA device; 2 for the CPU interpreter, so that persistent grids have several programs."""
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


def cdiv(a: int, b: int) -> int:
    """a / b rounded up. Triton's own takes several microseconds on the host."""
    return -(-a // b)


class KernelLauncher:
    """Launches a Triton kernel, straight through its compiled form once that is known.

    `kernel[grid](...)` works out on every call which compiled form its arguments need, in 20 us of CPU time on the
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

        Raises:
            KernelError: a tensor is on no GPU, or on another than the first.

        Args:
            tensors: one a pointer; None where a constant says that there is none, and for a parameter that is a tuple
                of pointers as many tensors, alike in dtype and device, as a constant says.
        """
        if not self._direct:
            if not _on_one_cpu_or_gpu(tensors):
                self._reject_devices(tensors)
            self._kernel[grid](*tensors, *strides, *scalars, *constants, num_warps=warps)
            return
        first = tensors[0]
        index = (first[0] if isinstance(first, tuple) else first).get_device()  # type: ignore[union-attr]
        if index != torch.cuda.current_device():
            if index < 0:
                self._reject_devices(tensors)
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
                self._reject_devices(tensors)
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

    def _reject_devices(self, tensors: tuple[Tensor | tuple[Tensor, ...] | None, ...]) -> NoReturn:
        """Name the first tensor that is on another device than the first of all, else that one, for being on no GPU."""
        module = getattr(self._kernel, "fn", self._kernel).__module__
        op = module.removeprefix("opslot.ops.").partition(".")[0]
        names = getattr(self._kernel, "arg_names", ())
        named = [
            (names[place].removesuffix("_ptr") if place < len(names) else f"pointer {place}", tensor)
            for place, given in enumerate(tensors)
            for tensor in (given if isinstance(given, tuple) else (given,))
            if tensor is not None
        ]
        home = named[0][1].device
        name, odd = next(((n, x) for n, x in named if x.device != home), named[0])
        found = f"it is on {odd.device}, {'not a GPU' if odd.device == home else f'others are on {home}'}"
        reject(f"the Triton kernel of {op}", name, found, f"move it, or set {op} to eager")


def _on_one_cpu_or_gpu(tensors: tuple[Tensor | tuple[Tensor, ...] | None, ...]) -> bool:
    devices = {
        x.device for given in tensors for x in (given if isinstance(given, tuple) else (given,)) if x is not None
    }
    return len(devices) == 1 and devices.pop().type in ("cpu", "cuda")
