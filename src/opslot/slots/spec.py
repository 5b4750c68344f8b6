"""What a kernel is: its name, its op, what it needs and how good it is where."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from opslot._base.device import DeviceFacts, has_package, triton_interpreted
from opslot._base.dtypes import dtype_name
from opslot._base.errors import ConfigError

if TYPE_CHECKING:
    import torch

DEVICE_TYPES = ("gpu", "npu", "cpu", "any")

Capability = tuple[int, int]


def _as_capability(name: str, value: Any) -> Capability | None:
    """(9, 0), 90 and "9.0" all name compute capability 9.0."""
    if value is None:
        return None
    # 9 is left out: it reads as 0.9, which every GPU has, where 9.0 is meant.
    if isinstance(value, int) and value >= 10:
        return divmod(value, 10)
    parts = value.split(".") if isinstance(value, str) else value
    if isinstance(parts, list | tuple) and len(parts) == 2 and all(str(part).isdecimal() for part in parts):
        return int(parts[0]), int(parts[1])
    raise ConfigError(f"{name}={value!r} is no compute capability; write (9, 0), 90 or '9.0'")


@dataclass(frozen=True)
class HardwareRequirement:
    """The hardware that a kernel runs on.

    Attributes:
        device_type: "gpu" (CUDA), "npu" (Ascend), "cpu" or "any"; "cuda" is read as "gpu".
        min_compute_capability: lowest CUDA compute capability, as (major, minor) or 80 for 8.0; gpu only.
        max_compute_capability: highest CUDA compute capability, inclusive; gpu only.
    """

    device_type: str = "any"
    min_compute_capability: Capability | None = None
    max_compute_capability: Capability | None = None

    def __post_init__(self) -> None:
        if self.device_type == "cuda":
            object.__setattr__(self, "device_type", "gpu")
        if self.device_type not in DEVICE_TYPES:
            raise ConfigError(f"device_type={self.device_type!r} is unknown; use one of {', '.join(DEVICE_TYPES)}")
        for name in ("min_compute_capability", "max_compute_capability"):
            value = _as_capability(name, getattr(self, name))
            if value is not None and self.device_type != "gpu":
                raise ConfigError(f"{name} is a property of GPUs, but device_type is {self.device_type!r}")
            object.__setattr__(self, name, value)
        low, high = self.min_compute_capability, self.max_compute_capability
        if low and high and low > high:
            raise ConfigError(
                f"min_compute_capability {low[0]}.{low[1]} is above max_compute_capability {high[0]}.{high[1]}; "
                "no GPU fits, exchange them"
            )

    def unsupported(self, device: DeviceFacts) -> str | None:
        """Why `device` does not fit, or None when it does."""
        if self.device_type == "any":
            return None
        if device.type != self.device_type:
            article = "an" if self.device_type == "npu" else "a"
            return f"needs {article} {self.device_type.upper()}, this is {device}"
        low, high = self.min_compute_capability, self.max_compute_capability
        if low and device.capability and device.capability < low:
            return f"needs compute capability {low[0]}.{low[1]} or higher, this is {device}"
        if high and device.capability and device.capability > high:
            return f"needs compute capability {high[0]}.{high[1]} or lower, this is {device}"
        return None


@dataclass(frozen=True)
class KernelRequest:
    """One place that asks for a kernel.

    Attributes:
        op_name, variant: the slot's op.
        device: facts of the device the module lives on.
        dtype: dtype the op computes in there; None when unknown.
        module: the module instance that holds the slot; None when asked in general.
        config: the Transformers config of the model around it; None when there is none.
    """

    op_name: str
    variant: str
    device: DeviceFacts
    dtype: torch.dtype | None = None
    module: Any = None
    config: Any = None


Priority = int | Mapping[str, int] | Callable[[KernelRequest], "int | None"] | None


def _all_dtypes(value: Any) -> bool:
    import torch

    return isinstance(value, Collection) and all(isinstance(x, torch.dtype) for x in value)


@dataclass(frozen=True)
class KernelSpec:
    """One implementation of one variant of an op.

    Attributes:
        name: what a configuration writes, e.g. "triton".
        op_name: the op it implements, e.g. "rms_norm".
        variant: the op's variant, e.g. "standard"; a kernel serves no other.
        factory: makes the kernel, called once when it is first needed, so that vendors are imported no
            earlier; or the kernel's own place as "package.module:attribute".
        hardware: where it runs.
        requires: top-level packages that must be importable, e.g. ("triton",).
        dtypes: dtypes it accepts; None for every floating dtype.
        supports: given a `KernelRequest`, why it does not serve that place, or None; asked after hardware, packages and
            dtype.
        priority: measured rank under `auto`, higher is faster: a number for every device, a mapping from device type,
            or a function of the request. None, or a device that is missing, keeps `auto` away. Eager code ranks 0.
        interpretable: a Triton kernel that also runs on CPU under TRITON_INTERPRET=1 (never under `auto`).
        description: one line for `opslot kernels`.
    """

    name: str
    op_name: str
    variant: str
    factory: Callable[[], Callable[..., Any]] | str
    hardware: HardwareRequirement = field(default_factory=HardwareRequirement)
    requires: tuple[str, ...] = ()
    dtypes: frozenset[torch.dtype] | None = None
    supports: Callable[[KernelRequest], str | None] | None = None
    priority: Priority = None
    interpretable: bool = False
    description: str = ""

    def __post_init__(self) -> None:
        if self.name in ("auto", "eager"):
            raise ConfigError(
                f"{self.op_name}/{self.variant}: {self.name!r} names opslot's own choice and cannot be a kernel; "
                "pick another name"
            )
        for label in ("name", "op_name", "variant"):
            value = getattr(self, label)
            if not isinstance(value, str) or not value:
                raise ConfigError(f"KernelSpec.{label} must be a non-empty string, got {value!r}")
        if isinstance(self.requires, str):
            object.__setattr__(self, "requires", (self.requires,))
        if isinstance(self.priority, Mapping) and "cuda" in self.priority:
            named = {"gpu" if device == "cuda" else device: rank for device, rank in self.priority.items()}
            object.__setattr__(self, "priority", named)
        for label, wanted in self._misfits():
            name = f"{self.op_name}/{self.variant} {self.name}"
            raise ConfigError(f"{name}: KernelSpec.{label} must be {wanted}, got {getattr(self, label)!r}")

    def _misfits(self) -> Iterator[tuple[str, str]]:
        """Fields that would fail far from here, in a model that asks for another kernel: (field, what it must be)."""
        if not callable(self.factory) and not (isinstance(self.factory, str) and ":" in self.factory):
            yield "factory", "a function that makes the kernel, or 'package.module:attribute'"
        if not isinstance(self.hardware, HardwareRequirement):
            yield "hardware", "a HardwareRequirement"
        if not isinstance(self.requires, tuple | list) or not all(isinstance(x, str) and x for x in self.requires):
            yield "requires", "names of packages, e.g. ('triton',)"
        if self.dtypes is not None and not _all_dtypes(self.dtypes):
            yield "dtypes", "a set of torch dtypes, or None for every floating dtype"
        if self.supports is not None and not callable(self.supports):
            yield "supports", "a function of a KernelRequest, or None"
        ranks = self.priority.values() if isinstance(self.priority, Mapping) else [self.priority]
        if not callable(self.priority) and not all(rank is None or isinstance(rank, int | float) for rank in ranks):
            yield "priority", "a number, a mapping from device type to numbers, a function of a KernelRequest, or None"
        elif isinstance(self.priority, Mapping) and not set(self.priority) <= set(DEVICE_TYPES) - {"any"}:
            yield "priority", "a mapping from the device types gpu, npu and cpu, or one number for all"

    @property
    def key(self) -> tuple[str, str, str]:
        return self.op_name, self.variant, self.name

    def unsupported(self, request: KernelRequest) -> str | None:
        """Why this kernel cannot serve `request`, or None when it can."""
        interpreted = self.interpretable and request.device.type == "cpu" and triton_interpreted()
        reason = None if interpreted else self.hardware.unsupported(request.device)
        if reason:
            hint = (
                " (TRITON_INTERPRET=1 runs it here, slowly)"
                if self.interpretable and request.device.type == "cpu"
                else ""
            )
            return reason + hint
        missing = [name for name in self.requires if not has_package(name)]
        if missing:
            return f"needs the package{'s' if len(missing) > 1 else ''} {', '.join(missing)}, not installed"
        if self.dtypes is not None and request.dtype is not None and request.dtype not in self.dtypes:
            accepted = ", ".join(sorted(map(dtype_name, self.dtypes)))
            return f"takes {accepted}, not {dtype_name(request.dtype)}"
        return self._supports_reason(request) if self.supports else None

    def _supports_reason(self, request: KernelRequest) -> str | None:
        """What `supports` says; where it fails, that is the reason, so that one bad kernel keeps no other from use."""
        assert self.supports is not None
        try:
            told = self.supports(request)
        except Exception as error:
            return f"its supports() raised {type(error).__name__}: {error}"
        if told is None or (isinstance(told, str) and told):
            return told
        return f"its supports() returned {told!r}, where None means that it serves and a text why it does not"

    def priority_for(self, request: KernelRequest) -> int | None:
        """Measured priority at `request`; None keeps `auto` from choosing it. A priority of one's own may raise."""
        if self.interpretable and request.device.type == "cpu":
            return None
        if isinstance(self.priority, Mapping):
            return self.priority.get(request.device.type)
        if callable(self.priority):
            found = self.priority(request)
            if found is not None and not isinstance(found, int | float):
                raise TypeError(f"it returned {found!r}, neither a number nor None")
            return found
        return self.priority
