"""`KernelSpec`: a kernel's op, requirements, supported calls and priorities."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from opslot._base.device import DeviceFacts, has_package, machine_devices, package_version, triton_interpreted
from opslot._base.dtypes import dtype_name
from opslot._base.errors import ConfigError

if TYPE_CHECKING:
    import torch

DEVICE_TYPES = ("gpu", "npu", "cpu", "any")

Capability = tuple[int, int]

# The GPU that priorities of a compute capability were measured on, for `explain`.
MEASURED_GPUS: Mapping[Capability, str] = {(9, 0): "NVIDIA H200"}


def _as_capability(name: str, value: Any) -> Capability | None:
    """(9, 0), 90 and "9.0" all name compute capability 9.0."""
    if value is None:
        return None
    # A single digit is rejected: divmod would read 9 as 0.9, which every GPU has.
    if isinstance(value, int) and value >= 10:
        return divmod(value, 10)
    parts = value.split(".") if isinstance(value, str) else value
    if isinstance(parts, list | tuple) and len(parts) == 2 and all(str(part).isdecimal() for part in parts):
        return int(parts[0]), int(parts[1])
    raise ConfigError(f"{name}={value!r} is not a valid compute capability", hint="write (9, 0), 90 or '9.0'")


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
            raise ConfigError(f"unknown device_type {self.device_type!r}", hint=f"use one of {', '.join(DEVICE_TYPES)}")
        for name in ("min_compute_capability", "max_compute_capability"):
            value = _as_capability(name, getattr(self, name))
            if value is not None and self.device_type != "gpu":
                raise ConfigError(
                    f"{name} is a property of GPUs, but device_type is {self.device_type!r}",
                    hint='use device_type="gpu"',
                )
            object.__setattr__(self, name, value)
        low, high = self.min_compute_capability, self.max_compute_capability
        if low and high and low > high:
            raise ConfigError(
                f"min_compute_capability {low[0]}.{low[1]} is above max_compute_capability {high[0]}.{high[1]}",
                hint="exchange them",
            )

    def unsupported(self, device: DeviceFacts) -> str | None:
        """Why `device` does not fit, or None if it does."""
        if self.device_type == "any":
            return None
        if device.type != self.device_type:
            article = "an" if self.device_type == "npu" else "a"
            return f"requires {article} {self.device_type.upper()}, this is {device}"
        low, high = self.min_compute_capability, self.max_compute_capability
        if low and device.capability and device.capability < low:
            return f"requires compute capability {low[0]}.{low[1]} or higher, this is {device}"
        if high and device.capability and device.capability > high:
            return f"requires compute capability {high[0]}.{high[1]} or lower, this is {device}"
        return None


_REQUIREMENT = "e.g. Requirement('quack', 'quack-kernels', '>=0.5')"


@dataclass(frozen=True)
class Requirement:
    """A package that a kernel imports. The only place where a version of it is stated.

    Attributes:
        module: the name to import, e.g. "quack" or "flash_attn.cute".
        distribution: the name to install, e.g. "quack-kernels"; the module's unless given.
        version: a version specifier (PEP 440), e.g. ">=0.5"; empty for any. A module whose distribution is not
            installed under that name (a build from source) has no version to compare and is accepted.
    """

    module: str
    distribution: str = ""
    version: str = ""

    def __post_init__(self) -> None:
        for label in ("module", "distribution", "version"):
            if not isinstance(getattr(self, label), str):
                raise ConfigError(
                    f"Requirement.{label} must be a string, got {getattr(self, label)!r}",
                    hint=_REQUIREMENT,
                )
        if not self.module:
            raise ConfigError("Requirement.module must be the name of a package, got ''", hint=_REQUIREMENT)
        if not self.distribution:
            object.__setattr__(self, "distribution", self.module)
        try:
            SpecifierSet(self.version)
        except InvalidSpecifier:
            raise ConfigError(
                f"Requirement.version must be a version specifier, e.g. '>=0.5', got {self.version!r}"
            ) from None

    def unsupported(self) -> str | None:
        """What is missing or has another version, or None if this requirement is met."""
        if not has_package(self.module):
            name = f"{self.distribution}{self.version}" if self.version else f"the package {self.module}"
            return f"requires {name}, not installed"
        found = package_version(self.distribution) if self.version else None
        if found is None or SpecifierSet(self.version).contains(found, prereleases=True):
            return None
        return f"requires {self.distribution}{self.version}, found {found}"


# For opslot's own Triton kernels.
TRITON = Requirement("triton", version=">=3.4")


@dataclass(frozen=True)
class KernelRequest:
    """A call site that a kernel is selected for.

    Attributes:
        op_name, variant: the slot's op.
        device: facts of the device the module is on.
        dtype: dtype the op computes in there; None if unknown.
        module: the module instance that holds the slot; None for a question about the op in general.
        config: the Transformers config of the model; None if there is none.
    """

    op_name: str
    variant: str
    device: DeviceFacts
    dtype: torch.dtype | None = None
    module: Any = None
    config: Any = None


PriorityValue = int | Callable[[KernelRequest], "int | None"]
PrioritySetting = PriorityValue | Mapping[Any, PriorityValue] | None


@dataclass(frozen=True)
class Priority:
    """A kernel's priority for one request.

    Attributes:
        value: higher is faster; eager code has 0.
        measured_on: the hardware it was measured on, e.g. "NVIDIA H200 (sm_90)"; empty if none is stated.
        measured_here: False if that is another compute capability than the request's.
    """

    value: float
    measured_on: str = ""
    measured_here: bool = True


def _all_dtypes(value: Any) -> bool:
    import torch

    return isinstance(value, Collection) and all(isinstance(x, torch.dtype) for x in value)


def _device_key(key: Any) -> Any:
    """A key of `KernelSpec.priority` in its one form; ConfigError if it is not a device."""
    if key == "cuda":
        return "gpu"
    return key if key in ("gpu", "npu", "cpu") else _as_capability("priority", key)


def _gpu_name(capability: Capability) -> str:
    sm = f"sm_{capability[0]}{capability[1]}"
    return f"{MEASURED_GPUS[capability]} ({sm})" if capability in MEASURED_GPUS else sm


@dataclass(frozen=True)
class KernelSpec:
    """One implementation of one variant of an op.

    Attributes:
        name: what a configuration writes, e.g. "triton".
        op_name: the op it implements, e.g. "rms_norm".
        variant: the op's variant, e.g. "standard"; a kernel serves one.
        factory: returns the kernel, called once, on first use, so that vendors are imported no earlier; or
            "package.module:attribute".
        hardware: where it runs.
        requires: packages that it imports, as `Requirement`s; a string requires a module of that name, in any version.
        dtypes: dtypes it accepts; None for every floating dtype.
        supports: given a `KernelRequest`, why it does not serve that call site, or None; called after the checks of
            hardware, packages and dtype.
        priority: measured priority under `auto`, higher is faster; eager code has 0. A mapping from the device it was
            measured on (a compute capability such as (9, 0), or "cpu" or "npu") to a number, or to a function of the
            request. A number or function alone, or the key "gpu", holds for every such device and states no
            measurement. `auto` never selects a kernel whose priority is None or does not cover the device.
        portable: its speed compared with other kernels carries over between GPUs (Triton, plain torch): where nothing
            was measured, `auto` uses the priority of the nearest compute capability. A kernel tuned for one
            architecture leaves it False, and `auto` selects it only where it was measured.
        relative_error: root mean square error of outputs and gradients, over their own root mean square, that `verify`
            allows instead of twice eager's error, for a kernel that computes in a format of fewer bits (FP8). `auto`
            never selects such a kernel.
        interpretable: a Triton kernel that also runs on CPU under TRITON_INTERPRET=1 (never under `auto`).
        description: one line for `opslot kernels`.
    """

    name: str
    op_name: str
    variant: str
    factory: Callable[[], Callable[..., Any]] | str
    hardware: HardwareRequirement = field(default_factory=HardwareRequirement)
    requires: tuple[Requirement | str, ...] = ()
    dtypes: frozenset[torch.dtype] | None = None
    supports: Callable[[KernelRequest], str | None] | None = None
    priority: PrioritySetting = None
    portable: bool = False
    relative_error: float = 0.0
    interpretable: bool = False
    description: str = ""

    def __post_init__(self) -> None:
        if self.name in ("auto", "eager"):
            raise ConfigError(
                f"{self.op_name}/{self.variant}: {self.name!r} is reserved and cannot name a kernel",
                hint="pick another name",
            )
        for label in ("name", "op_name", "variant"):
            value = getattr(self, label)
            if not isinstance(value, str) or not value:
                raise ConfigError(
                    f"KernelSpec.{label} must be a non-empty string, got {value!r}",
                    hint="e.g. KernelSpec('mine', 'rms_norm', 'standard', 'my_package.kernels:rms_norm')",
                )
        for label, wanted in self._invalid_fields():
            name = f"{self.op_name}/{self.variant} {self.name}"
            raise ConfigError(f"{name}: KernelSpec.{label} must be {wanted}, got {getattr(self, label)!r}")
        requires = (self.requires,) if isinstance(self.requires, str | Requirement) else self.requires
        object.__setattr__(
            self, "requires", tuple(x if isinstance(x, Requirement) else Requirement(x) for x in requires)
        )
        if isinstance(self.priority, Mapping):
            object.__setattr__(self, "priority", {_device_key(key): value for key, value in self.priority.items()})

    def _invalid_fields(self) -> Iterator[tuple[str, str]]:
        """Fields that would fail later, in a model that selects another kernel: (field, what it must be)."""
        if not callable(self.factory) and not (isinstance(self.factory, str) and ":" in self.factory):
            yield "factory", "a function that returns the kernel, or 'package.module:attribute'"
        if not isinstance(self.hardware, HardwareRequirement):
            yield "hardware", "a HardwareRequirement"
        requires = [self.requires] if isinstance(self.requires, str | Requirement) else self.requires
        if not isinstance(requires, tuple | list) or not all(isinstance(x, str | Requirement) and x for x in requires):
            yield "requires", "Requirements or names of modules, e.g. ('triton',)"
        if not 0.0 <= self.relative_error < 1.0:
            yield "relative_error", "a fraction, at least 0 and below 1"
        if self.relative_error and self.priority is not None:
            yield "priority", "None for a kernel with a relative_error: auto selects only kernels as accurate as eager"
        if self.dtypes is not None and not _all_dtypes(self.dtypes):
            yield "dtypes", "a set of torch dtypes, or None for every floating dtype"
        if self.supports is not None and not callable(self.supports):
            yield "supports", "a function of a KernelRequest, or None"
        values = self.priority.values() if isinstance(self.priority, Mapping) else [self.priority]
        if not all(value is None or callable(value) or isinstance(value, int | float) for value in values):
            yield "priority", "a number, a function of a KernelRequest, a mapping from devices to these, or None"
        try:
            for key in self.priority if isinstance(self.priority, Mapping) else ():
                _device_key(key)
        except ConfigError:
            yield (
                "priority",
                "a mapping from gpu, npu, cpu or a compute capability such as (9, 0), or one number for all",
            )

    @property
    def key(self) -> tuple[str, str, str]:
        return self.op_name, self.variant, self.name

    @property
    def package(self) -> str:
        """The top-level package whose code `factory` is."""
        module = self.factory if isinstance(self.factory, str) else getattr(self.factory, "__module__", "")
        return module.partition(":")[0].partition(".")[0]

    def unsupported(self, request: KernelRequest) -> str | None:
        """Why this kernel cannot serve `request`, or None if it can."""
        interpreted = self.interpretable and request.device.type == "cpu" and triton_interpreted()
        reason = None if interpreted else self.hardware.unsupported(request.device)
        if reason:
            interpretable = self.interpretable and request.device.type == "cpu"
            return reason + (" (TRITON_INTERPRET=1 runs it here, slowly)" if interpretable else "")
        for requirement in self.requires:
            reason = requirement.unsupported() if isinstance(requirement, Requirement) else None
            if reason:
                return reason
        if self.dtypes is not None and request.dtype is not None and request.dtype not in self.dtypes:
            accepted = ", ".join(sorted(map(dtype_name, self.dtypes)))
            return f"takes {accepted}, not {dtype_name(request.dtype)}"
        return self._supports_reason(request) if self.supports else None

    def unsupported_here(self) -> str | None:
        """Why no device of this machine can run this kernel, or None if one can."""
        devices = machine_devices()
        reasons = [self.unsupported(KernelRequest(self.op_name, self.variant, device)) for device in devices]
        return None if None in reasons else reasons[0]

    def _supports_reason(self, request: KernelRequest) -> str | None:
        """What `supports` returns; if it fails, that is the reason, and other kernels stay usable."""
        assert self.supports is not None
        try:
            reason = self.supports(request)
        except Exception as error:
            return f"its supports() raised {type(error).__name__}: {error}"
        if reason is None or (isinstance(reason, str) and reason):
            return reason
        return f"its supports() returned {reason!r}; it must return None or the reason as a string"

    def priority_for(self, request: KernelRequest) -> Priority | None:
        """Priority for `request`; None if `auto` must not select this kernel. A third party's function may raise."""
        if self.priority is None or (self.interpretable and request.device.type == "cpu"):
            return None
        if not isinstance(self.priority, Mapping):
            return _priority(self.priority, request)
        device = request.device
        if device.type != "gpu":
            return _priority(self.priority.get(device.type), request, "CPU" if device.type == "cpu" else "")
        if device.capability and device.capability in self.priority:
            return _priority(self.priority[device.capability], request, _gpu_name(device.capability))
        if "gpu" in self.priority:
            return _priority(self.priority["gpu"], request)
        measured = self._nearest_measured(device)
        if measured is None or not self.portable:
            return None
        return _priority(self.priority[measured], request, _gpu_name(measured), measured_here=False)

    def unmeasured(self, request: KernelRequest) -> str | None:
        """Why `auto` does not select this usable kernel on the GPU of `request`; None if it is not for that reason."""
        if not isinstance(self.priority, Mapping) or request.device.type != "gpu" or self.portable:
            return None
        if request.device.capability in self.priority or "gpu" in self.priority:
            return None
        measured = self._nearest_measured(request.device)
        return measured and f"measured on {_gpu_name(measured)} only; name it, or run `opslot bench --tune`"

    def _nearest_measured(self, device: DeviceFacts) -> Capability | None:
        """The compute capability with a priority that is nearest to that of `device`."""
        assert isinstance(self.priority, Mapping)
        major, minor = device.capability or (0, 0)
        measured = [key for key in self.priority if isinstance(key, tuple)]
        return min(measured, key=lambda c: (abs(10 * (c[0] - major) + c[1] - minor), c), default=None)


def _priority(
    setting: PriorityValue | None, request: KernelRequest, measured_on: str = "", measured_here: bool = True
) -> Priority | None:
    value = setting(request) if callable(setting) else setting
    if value is None:
        return None
    if not isinstance(value, int | float):
        raise TypeError(f"it returned {value!r}, expected a number or None")
    return Priority(value, measured_on, measured_here)
