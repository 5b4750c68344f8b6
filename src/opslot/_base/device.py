"""Devices and packages of this machine, which decide which kernels can run."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from opslot._base.errors import ConfigError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class DeviceFacts:
    """Properties of a device.

    Attributes:
        type: "cpu", "gpu" or "npu".
        capability: CUDA compute capability as (major, minor); None elsewhere.
        name: the vendor's name of the device.
    """

    type: str
    capability: tuple[int, int] | None = None
    name: str = ""

    @property
    def torch_type(self) -> str:
        """torch's device type: "cuda" for a GPU."""
        return "cuda" if self.type == "gpu" else self.type

    def __str__(self) -> str:
        extra = f" sm_{self.capability[0]}{self.capability[1]}" if self.capability else ""
        return f"{self.name or self.type}{extra}"


CPU = DeviceFacts("cpu", name="CPU")


@functools.cache
def _gpu_facts(index: int) -> DeviceFacts:
    import torch

    major, minor = torch.cuda.get_device_capability(index)
    return DeviceFacts("gpu", (major, minor), torch.cuda.get_device_name(index))


def usable_device(device: torch.device | str) -> torch.device:
    """`device` as a torch.device; ConfigError if it is not valid, or is a GPU that this machine does not have."""
    import torch

    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device {device!r} is not a valid device", hint="use cpu, cuda, cuda:1 or npu") from error
    count = torch.cuda.device_count() if found.type == "cuda" else 0
    if found.type == "cuda" and (found.index or 0) >= count:
        raise ConfigError(
            f"device {str(found)!r}: the number of GPUs that torch finds here is {count}",
            hint=f"use cpu{(f', or cuda:0 to cuda:{count - 1}' if count else '')}",
        )
    return found


def facts_of(device: torch.device | str) -> DeviceFacts:
    """Properties of a torch device; for the meta device, those of the machine's best device.

    Raises:
        ConfigError: see `usable_device`.
    """
    import torch

    device = usable_device(device)
    if device.type == "cuda":
        return _gpu_facts(device.index if device.index is not None else torch.cuda.current_device())
    if device.type == "npu":
        return DeviceFacts("npu", name="Ascend NPU")
    if device.type == "meta":
        return best_device()
    return CPU if device.type == "cpu" else DeviceFacts(device.type, name=device.type)


def machine_devices() -> tuple[DeviceFacts, ...]:
    """The kinds of device of this machine, best first; the CPU is always last."""
    import torch

    found: list[DeviceFacts] = []
    if torch.cuda.is_available():
        found.append(_gpu_facts(torch.cuda.current_device()))
    npu = getattr(torch, "npu", None)
    if npu is not None and npu.is_available():
        found.append(DeviceFacts("npu", name="Ascend NPU"))
    return (*found, CPU)


def best_device() -> DeviceFacts:
    """The default device for training."""
    return machine_devices()[0]


@functools.cache
def cpu_name() -> str:
    """The CPU's model, as the operating system names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    found = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return found or platform.processor() or platform.machine()


def usable_cores() -> int:
    """CPU cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache
def has_package(name: str) -> bool:
    """Whether top-level package `name` can be imported; it is not imported."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


@functools.cache
def package_version(distribution: str) -> str | None:
    """Version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def triton_interpreted() -> bool:
    """Whether Triton kernels run on the CPU through its interpreter (TRITON_INTERPRET=1)."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


# Dense bf16 TFLOP/s of GPUs with accumulation in fp32, from the vendors' data sheets. The first name that the device's
# name contains counts.
_PEAK_BF16_TFLOPS = (
    ("GB300", 2500),
    ("GB200", 2500),
    ("B300", 2250),
    ("B200", 2250),
    ("B100", 1750),
    ("H100 NVL", 835),
    ("H100 PCIe", 756),
    ("H100", 989),
    ("H200 NVL", 835),
    ("H200", 989),
    ("GH200", 989),
    ("H800 PCIe", 756),
    ("H800", 989),
    ("H20", 148),
    ("A100", 312),
    ("A800", 312),
    ("A10G", 70),
    ("A10", 125),
    ("A30", 165),
    ("A40", 150),
    ("L40S", 362),
    ("L40", 181),
    ("L4", 121),
    ("RTX PRO 6000", 503),
    ("RTX 6000 Ada", 364),
    ("RTX 5090", 210),
    ("RTX 5080", 113),
    ("RTX 4090", 165),
    ("RTX 4080", 97),
    ("RTX 3090", 71),
    ("RTX A6000", 155),
    ("MI355X", 2500),
    ("MI350X", 2300),
    ("MI325X", 1307),
    ("MI300X", 1307),
    ("MI250X", 192),
    ("MI210", 181),
)


def peak_bf16_tflops(name: str) -> float | None:
    """Peak dense bf16 TFLOP/s of a device by its name, e.g. "NVIDIA H200"; None for an unknown one."""
    words = f" {name.lower().replace('-', ' ')} "
    return next((float(peak) for part, peak in _PEAK_BF16_TFLOPS if f" {part.lower()} " in words), None)
