"""Host-side helpers for Triton kernels."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from opslot._base.device import triton_interpreted
from opslot._base.errors import KernelError


@functools.cache
def sm_count(device: torch.device) -> int:
    """SMs of a CUDA device; 2 for the CPU interpreter, so that persistent grids have several programs."""
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def compute_capability(device: torch.device) -> tuple[int, int] | None:
    """Compute capability of a GPU; None for the CPU interpreter."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one CTA can use: 227 KiB on an H200, 99 KiB on GPUs of desktops and workstations."""
    if device.type != "cuda":
        return 227 * 1024
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)  # the first on CUDA


def cdiv(a: int, b: int) -> int:
    """a / b rounded up. Triton's own takes several microseconds on the host."""
    return -(-a // b)


# Without `torch.cuda.current_device`'s check that CUDA is initialized, which a tensor on a GPU shows.
_current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


@functools.cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def launch_concurrently(device: torch.device, first: Callable[[], object], second: Callable[[], object]) -> None:
    """Call two functions whose kernels do not fill a GPU, so that it runs them at the same time.

    What is launched before and afterwards on the current stream is ordered with both.

    Args:
        first: launches on a stream of its own, so it must not allocate tensors.
        second: launches on the current stream, and must not read what `first` writes.
    """
    if device.type != "cuda":
        first()
        second()
        return
    current, other = torch.cuda.current_stream(device), _second_stream(device)
    other.wait_stream(current)
    with torch.cuda.stream(other):
        first()
    second()
    current.wait_stream(other)


class KernelLauncher:
    """Launches a Triton kernel, and reuses the compiled kernel without Triton's lookup.

    `kernel[grid](...)` looks up the compiled kernel on every call, which takes 20 us on the host of an H200; steps of
    small models are bound by this. Compiled kernels are cached by device, dtypes, constants and what Triton specializes
    on. All calls go through Triton while a profiler has hooks on launches, and on AMD GPUs, where Triton also
    specializes on tensors of less than 2 GiB.

    The kernel's parameters are in this order: pointers, strides, scalars that are not specialized on, constants.
    """

    def __init__(self, kernel: Any, *, max_registers: int | None = None) -> None:
        """`max_registers`: of a thread, on NVIDIA GPUs; fewer let more CTAs run on an SM."""
        self._kernel = kernel
        self._options = {} if max_registers is None or torch.version.hip else {"maxnreg": max_registers}
        self._compiled: dict[tuple[Any, ...], Any] = {}
        self._direct = not triton_interpreted()
        if self._direct:
            from opslot._base.jit import has_launch_hooks

            self._has_hooks = has_launch_hooks

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
            KernelError: a tensor is not on a GPU, or not on that of the first tensor.

        Args:
            tensors: one per pointer; None if a constant disables it; a tuple of tensors of the same dtype and device
                for a parameter that is a tuple of pointers.
        """
        if not self._direct:
            if not _on_one_cpu_or_gpu(tensors):
                self._reject_devices(tensors)
            # The interpreter accepts any number.
            assert warps.bit_count() == 1, f"{warps} warps, not a power of two"
            self._kernel[grid](*tensors, *strides, *scalars, *constants, num_warps=warps, **self._options)
            return
        first = tensors[0]
        index = (first[0] if isinstance(first, tuple) else first).get_device()  # type: ignore[union-attr]
        if index != _current_device():
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
        dtypes: list[torch.dtype | None] = []
        for tensor in tensors:
            if tensor is None:
                addresses.append(None)
                dtypes.append(None)
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
            dtypes.append(tensor.dtype)
            if tensor.get_device() != index:
                self._reject_devices(tensors)
        for scalar in scalars:
            if type(scalar) is int:
                sizes |= scalar
        key: tuple[Any, ...] = (index, warps, constants, *dtypes)
        if bits & 15 or sizes >> 31:
            key += _specialization(addresses, strides, scalars)
        compiled = self._compiled.get(key)
        if compiled is None or torch.version.hip or self._has_hooks():
            self._compiled[key] = self._kernel[grid](
                *tensors, *strides, *scalars, *constants, num_warps=warps, **self._options
            )
            return
        # Addresses: for each tensor, Triton would query the CUDA driver about its memory. No metadata and hooks.
        compiled.run(
            *grid,
            torch._C._cuda_getCurrentRawStream(index),
            compiled.function,
            compiled.packed_metadata,
            None,
            None,
            None,
            *addresses,
            *strides,
            *scalars,
            *constants,
        )

    def _reject_devices(self, tensors: tuple[Tensor | tuple[Tensor, ...] | None, ...]) -> NoReturn:
        """Raise for the first tensor that is not on the device of tensor 0, or for tensor 0 if it is not on a GPU."""
        module = getattr(self._kernel, "fn", self._kernel).__module__
        op = module.removeprefix("opslot.").removeprefix("ops.").partition(".")[0]
        names = getattr(self._kernel, "arg_names", ())
        named = [
            (names[position].removesuffix("_ptr") if position < len(names) else f"pointer {position}", tensor)
            for position, given in enumerate(tensors)
            for tensor in (given if isinstance(given, tuple) else (given,))
            if tensor is not None
        ]
        home = named[0][1].device
        name, odd = next(((n, x) for n, x in named if x.device != home), named[0])
        found = f"it is on {odd.device}, {'not a GPU' if odd.device == home else f'others are on {home}'}"
        raise KernelError(
            f"the Triton kernel of {op} cannot take {name}: {found}", hint=f"move it, or set {op} to eager"
        )


def _specialization(
    addresses: list[int | tuple[int, ...] | None], strides: tuple[int, ...], scalars: tuple[float, ...]
) -> tuple[Any, ...]:
    """What Triton specializes on where a pointer or stride is not divisible by 16, or an integer is 2^31 or more.

    These are the divisibility of each pointer and stride, strides of 1, which are constants, and integers of 64 bits.
    """
    return (
        *[
            tuple([one & 15 == 0 for one in address]) if isinstance(address, tuple) else (address or 0) & 15 == 0
            for address in addresses
        ],
        *[1 if stride == 1 else (stride & 15 == 0, stride >> 31 == 0) for stride in strides],
        *[scalar >> 31 == 0 for scalar in scalars if type(scalar) is int],
    )


def _on_one_cpu_or_gpu(tensors: tuple[Tensor | tuple[Tensor, ...] | None, ...]) -> bool:
    devices = {
        x.device for given in tensors for x in (given if isinstance(given, tuple) else (given,)) if x is not None
    }
    return len(devices) == 1 and devices.pop().type in ("cpu", "cuda")
