"""The registry of ops and kernels, and the selection of a kernel for a request."""

from __future__ import annotations

import difflib
import importlib
import inspect
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from opslot._base.device import DeviceFacts
from opslot._base.dtypes import dtype_name
from opslot._base.errors import ConfigError, KernelError
from opslot._base.plugins import load_entry_points
from opslot.slots.op import OpSpec
from opslot.slots.profile import Profile, Timing, read_profile
from opslot.slots.spec import KernelRequest, KernelSpec, Priority

ENTRY_POINT_GROUP = "opslot.kernels"
# Modules that register the built-in ops when they are imported.
_BUILTIN_SOURCES = ("opslot.ops", "opslot.optim")


@dataclass(frozen=True)
class Resolution:
    """Which implementation serves a request, and why.

    Attributes:
        chosen: kernel name, or "eager" for Transformers' own code.
        why: one sentence.
        rejected: (name, reason) of every other implementation.
        explicit: a person named it, so it must never be replaced silently.
        by_preset: it is `eager` of the preset, which leaves to Transformers which of its implementations runs.
    """

    op_name: str
    variant: str
    chosen: str
    why: str
    rejected: tuple[tuple[str, str], ...]
    explicit: bool
    by_preset: bool = False

    @property
    def names_eager(self) -> bool:
        """Whether a field names "eager", which is Transformers' implementation of that name where it has several."""
        return self.chosen == "eager" and self.explicit and not self.by_preset


class KernelRegistry:
    """Ops and kernels by name. Thread-safe; kernels load at their first use."""

    def __init__(self, sources: Iterable[str] = (), entry_points: bool = False) -> None:
        self._ops: dict[str, OpSpec] = {}
        self._specs: dict[tuple[str, str, str], KernelSpec] = {}
        self._loaded: dict[tuple[str, str, str], Callable[..., Any]] = {}
        self._pending = list(sources)
        self._entry_points = entry_points
        self._lock = threading.RLock()
        self._discovering = False

    def register_op(self, op: OpSpec) -> OpSpec:
        """Add an op. ConfigError when the name is taken by another one, or `op` is not an OpSpec."""
        if not isinstance(op, OpSpec):
            raise ConfigError(
                f"register_op takes an OpSpec, got {op!r}", hint="describe the op: OpSpec(name, variants, ...)"
            )
        with self._lock:
            if self._ops.setdefault(op.name, op) is not op:
                raise ConfigError(f"op {op.name!r} is registered already", hint="give the new one another name")
            return op

    def register(self, spec: KernelSpec, replace: bool = False) -> KernelSpec:
        """Add a kernel.

        Raises:
            ConfigError: unknown op or variant, a taken (op, variant, name) without `replace`, or a kernel whose
                signature differs from the op's contract. A kernel that cannot load on this machine is checked when it
                does.
        """
        if not isinstance(spec, KernelSpec):
            raise ConfigError(
                f"register takes a KernelSpec, got {spec!r}", hint="wrap the kernel: KernelSpec(name, op, variant, ...)"
            )
        # The package of built-in ops may be imported before the registry is used: its kernels are registered after
        # their op, and must not load entry points, which need all ops.
        if spec.op_name not in self._ops:
            self._discover()
        with self._lock:
            op = self._ops.get(spec.op_name) or self.op(spec.op_name)
            op.variant(spec.variant)
            if spec.key in self._specs and not replace:
                raise ConfigError(
                    f"kernel {spec.name!r} for {spec.op_name}/{spec.variant} is registered already",
                    hint="choose another name or pass replace=True",
                )
            # Built-in and entry-point kernels stay lazy (their own tests load them); a kernel registered by hand is
            # checked at once wherever it can run, so that the mistake shows where it is made.
            kernel = None
            by_hand = not self._discovering and callable(spec.factory)
            if by_hand and spec.supports is None and spec.unsupported_here() is None:
                kernel = self._make(spec)
            self._specs[spec.key] = spec
            self._loaded.pop(spec.key, None)
            if kernel is not None:
                self._loaded[spec.key] = kernel
            return spec

    def unregister(self, op_name: str, variant: str, name: str) -> None:
        """Remove a kernel; models bound to it keep it. ConfigError naming the alternatives when it does not exist."""
        key = self.get(op_name, variant, name).key
        with self._lock:
            self._specs.pop(key, None)
            self._loaded.pop(key, None)

    def _discover(self) -> None:
        if not self._pending and not self._entry_points:
            return
        with self._lock:
            if self._discovering:
                return
            self._discovering = True
            try:
                while self._pending:
                    importlib.import_module(self._pending[0])
                    del self._pending[0]
                if self._entry_points:
                    self._entry_points = False
                    load_entry_points(ENTRY_POINT_GROUP, self)
            finally:
                self._discovering = False

    @property
    def ops(self) -> dict[str, OpSpec]:
        """Every op by name."""
        self._discover()
        return dict(self._ops)

    def op(self, name: str) -> OpSpec:
        """Op `name`; ConfigError with near names when there is none."""
        self._discover()
        if name not in self._ops:
            near = difflib.get_close_matches(name, self._ops, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(sorted(self._ops))}"
            raise ConfigError(f"unknown op {name!r}", hint=hint)
        return self._ops[name]

    def specs(self, op_name: str | None = None, variant: str | None = None) -> list[KernelSpec]:
        """Registered kernels, in order of registration."""
        self._discover()
        return [
            spec for spec in self._specs.values() if op_name in (None, spec.op_name) and variant in (None, spec.variant)
        ]

    def selected_by_auto(self, op_name: str, variant: str) -> bool:
        """Whether `auto` can select any kernel of the variant, on some device."""
        return any(spec.priority is not None for spec in self.specs(op_name, variant))

    def get(self, op_name: str, variant: str, name: str) -> KernelSpec:
        """One kernel; ConfigError naming the alternatives when it does not exist."""
        op = self.op(op_name)
        op.variant(variant)
        spec = self._specs.get((op_name, variant, name))
        if spec is None:
            served = sorted({s.variant for s in self.specs(op_name) if s.name == name})
            others = ["eager", *(s.name for s in self.specs(op_name, variant))]
            found = (
                f"{name!r} serves only the variant{'s' if len(served) > 1 else ''} {', '.join(served)}"
                if served
                else "no such kernel"
            )
            raise ConfigError(
                f"{op.field_of(variant)}={name!r} for {op_name}/{variant}: {found}; "
                f"use one of {', '.join(others)} or auto"
            )
        return spec

    def load(self, op_name: str, variant: str, name: str) -> Callable[..., Any]:
        """The kernel itself, made on first use.

        Raises:
            KernelError: its factory failed, or its signature differs from the contract.
        """
        spec = self.get(op_name, variant, name)
        with self._lock:
            if spec.key not in self._loaded:
                self._loaded[spec.key] = self._make(spec)
            return self._loaded[spec.key]

    def _make(self, spec: KernelSpec) -> Callable[..., Any]:
        label = f"kernel {spec.name!r} for {spec.op_name}/{spec.variant}"
        try:
            if isinstance(spec.factory, str):
                module, _, attribute = spec.factory.partition(":")
                kernel = getattr(importlib.import_module(module), attribute)
            else:
                kernel = spec.factory()
        except Exception as error:
            field = self.op(spec.op_name).field_of(spec.variant)
            hint = _factory_hint(spec) or f"fix what it imports, or select another kernel, e.g. {field}='eager'"
            raise KernelError(f"{label} could not be loaded: {type(error).__name__}: {error}", hint=hint) from error
        if not callable(kernel):
            raise ConfigError(f"{label}: its factory gave no function", found=repr(kernel), hint="return the kernel")
        problem = self.op(spec.op_name).variant(spec.variant).signature_problem(kernel)
        if problem:
            raise ConfigError(f"{label} {problem}", hint="give it the names, order and defaults of the op's reference")
        return kernel

    def resolve(self, request: KernelRequest, wanted: str = "auto") -> Resolution:
        """Choose an implementation for `request`.

        Args:
            wanted: "auto", "eager" or a kernel's name. A named kernel is never replaced.

        Raises:
            ConfigError: the named kernel does not exist for this variant or cannot run here; lists every alternative
                and why the others cannot.
        """
        op = self.op(request.op_name)
        specs = self.specs(request.op_name, request.variant)
        reasons = {spec.name: spec.unsupported(request) for spec in specs}
        field = op.field_of(request.variant)
        if wanted == "auto":
            return self._resolve_auto(request, specs, reasons)
        if wanted != "eager":
            self.get(request.op_name, request.variant, wanted)
            if reasons[wanted]:
                raise ConfigError(
                    f"{field}={wanted!r} for {request.op_name}/{request.variant}: {reasons[wanted]}\n"
                    f"{usable_values(reasons, wanted)}"
                )
        rejected = [("eager", f"{field} names another")] if wanted != "eager" else []
        rejected += [(n, r or f"{field} names another") for n, r in reasons.items() if n != wanted]
        return Resolution(request.op_name, request.variant, wanted, f"named by {field}", tuple(rejected), True)

    def _resolve_auto(
        self, request: KernelRequest, specs: list[KernelSpec], reasons: dict[str, str | None]
    ) -> Resolution:
        profile = read_profile(request.device)
        timing = self._timing(request, profile)
        if timing is not None:
            usable = {n: t for n, t in timing.ms.items() if n == "eager" or reasons.get(n, "gone") is None}
            if usable:
                return _fastest(request, usable, timing, profile, reasons)
        priorities = _priorities(request, specs, reasons)
        # Numbers measured on another GPU than this one come after those measured on this one.
        faster = [(p.measured_here, p.value, name) for name, p in priorities.items() if p is not None and p.value > 0]
        chosen = max(faster)[2] if faster else "eager"
        best = priorities.get(chosen)
        here = _device_label(request.device)
        rejected = [] if best is None else [("eager", _slower(Priority(0, best.measured_on, best.measured_here)))]
        for spec in specs:
            if spec.name == chosen:
                continue
            priority = priorities.get(spec.name)
            if reasons[spec.name]:
                reason = reasons[spec.name]
            elif priority is not None:
                reason = _slower(priority)
            else:
                reason = f"usable, but {spec.unmeasured(request) or f'not measured faster than eager on {here}'}"
            rejected.append((spec.name, str(reason)))
        why = _why(best, here) if best is not None else f"no usable kernel was measured faster than eager on {here}"
        if best is None and _is_faster_in_bfloat16(request, specs, reasons):
            why += " in float32; for autocast in bfloat16, pass dtype=torch.bfloat16"
        return Resolution(request.op_name, request.variant, chosen, why, tuple(rejected), False)

    def _timing(self, request: KernelRequest, profile: Profile) -> Timing | None:
        """What was measured at the shape of the request's call site, or None."""
        variant = self.op(request.op_name).variant(request.variant)
        if not profile.timings or request.dtype is None or variant.static_shape is None:
            return None
        shape = variant.static_shape(request)
        if shape is None:
            return None
        return profile.at(request.op_name, request.variant, dtype_name(request.dtype), shape)


def usable_values(reasons: Mapping[str, str | None], wanted: str) -> str:
    """For an error about `wanted`: which values of its field are usable, and why the others are not."""
    usable = ["eager", *(name for name, reason in reasons.items() if reason is None), "auto"]
    others = [f"\n      {name}: {reason}" for name, reason in reasons.items() if reason and name != wanted]
    return f"    usable here: {', '.join(usable)}" + (f"\n    not usable:{''.join(others)}" if others else "")


def _device_label(device: DeviceFacts) -> str:
    """E.g. "sm_90" or "CPU"; priorities depend on no more of a device."""
    return f"sm_{device.capability[0]}{device.capability[1]}" if device.capability else device.type.upper()


def _priorities(
    request: KernelRequest, specs: Iterable[KernelSpec], reasons: dict[str, str | None]
) -> dict[str, Priority | None]:
    """By name, of the kernels without a reason against them; one whose priority() raises gets a reason."""
    found: dict[str, Priority | None] = {}
    for spec in specs:
        if reasons[spec.name] is None:
            try:
                found[spec.name] = spec.priority_for(request)
            except Exception as error:
                reasons[spec.name] = f"its priority() raised {type(error).__name__}: {error}"
    return found


def _is_faster_in_bfloat16(
    request: KernelRequest, specs: Iterable[KernelSpec], reasons: Mapping[str, str | None]
) -> bool:
    """Whether a kernel that is usable for a request in float32 on a GPU has a priority in bfloat16."""
    import torch

    if request.dtype != torch.float32 or request.device.type != "gpu":
        return False
    priorities = _priorities(replace(request, dtype=torch.bfloat16), specs, dict(reasons))
    return any(priority is not None for priority in priorities.values())


def _why(best: Priority, here: str) -> str:
    if not best.measured_on:
        return f"highest priority, {best.value}"
    if best.measured_here:
        return f"fastest measured on {best.measured_on}, priority {best.value}"
    return (
        f"highest priority, {best.value}; not measured on {here}, ordered as measured on {best.measured_on}; "
        "run `opslot bench --tune` to measure this GPU"
    )


def _slower(priority: Priority) -> str:
    if not priority.measured_on:
        return f"lower priority, {priority.value}"
    if priority.measured_here:
        return f"slower on {priority.measured_on}, priority {priority.value}"
    return f"lower priority, {priority.value}, measured on {priority.measured_on}"


def _factory_hint(spec: KernelSpec) -> str:
    """What to do where the kernel itself was given for its factory, or nothing."""
    if isinstance(spec.factory, str):
        return ""
    try:
        inspect.signature(spec.factory).bind()
    except TypeError:
        return "the factory is called without arguments; where it is the kernel itself, pass `lambda: kernel`"
    except ValueError:
        pass
    return ""


def _fastest(
    request: KernelRequest,
    usable: Mapping[str, float],
    timing: Timing,
    profile: Profile,
    reasons: Mapping[str, str | None],
) -> Resolution:
    chosen = min(usable, key=lambda name: usable[name])
    beside = f", eager {usable['eager']:.3g}" if chosen != "eager" and "eager" in usable else ""
    why = f"fastest measured here: {usable[chosen]:.3g} ms{beside} ({timing.tokens} tokens, profile of {profile.date})"
    rejected = []
    for name in ("eager", *reasons):
        if name == chosen:
            continue
        reason = reasons.get(name) or timing.failed.get(name)
        if reason is None:
            reason = f"{usable[name]:.3g} ms here" if name in usable else "not in this machine's profile"
        rejected.append((name, reason))
    return Resolution(request.op_name, request.variant, chosen, why, tuple(rejected), False)


KERNEL_REGISTRY = KernelRegistry(sources=_BUILTIN_SOURCES, entry_points=True)
