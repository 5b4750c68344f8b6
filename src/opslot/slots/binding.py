"""`Binding`: which kernel is in which slot of a model, why, and what is applied to it.

`resolve` makes one without changing the model, parallelization makes another one from it, and only `write` changes
modules. What wraps a kernel is kept with the module, so that the next `resolve` finds it again: a model that was
parallelized keeps its wrappers when it is bound again, moves to another device or resumes.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from opslot._base.device import DeviceFacts, facts_of
from opslot._base.dtypes import dtype_name
from opslot._base.errors import ConfigError, list_problems
from opslot._base.wrapper_tensors import wrapper_class
from opslot.slots.config import OpsImplementationConfig
from opslot.slots.op import OpSpec
from opslot.slots.profile import ProfileError
from opslot.slots.protocol import (
    ModuleSlot,
    Skipped,
    attached,
    replaced_forward,
    skip_reason,
    skipped_parts,
    walk_slots,
    wrappers_of,
)
from opslot.slots.registry import KERNEL_REGISTRY, Resolution
from opslot.slots.spec import KernelRequest

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Wrapper:
    """Something that runs around whatever kernel is in a slot, such as expert parallelism.

    It can be applied again to the next kernel of the slot, and is pickled with the model.

    Attributes:
        name: as `explain` shows it, e.g. "expert parallel".
        wrap: `(module, kernel, reference)` to what the slot of the module holds instead of the kernel. The kernel is
            None where the slot runs Transformers' implementation, and None returned leaves that so. The reference is
            the op's plain torch code, with the same signature as kernels.
    """

    name: str
    wrap: Callable[[Any, Callable[..., Any] | None, Callable[..., Any]], Callable[..., Any] | None]


def wrapper_of(name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Wrapper:
    """A wrapper that puts `around(kernel)` into the slot, where `kernel` is the op's reference on eager."""
    return Wrapper(name, functools.partial(_around, around))


def _around(
    around: Callable[..., Any], module: Any, kernel: Callable[..., Any] | None, reference: Callable[..., Any]
) -> Callable[..., Any]:
    return around(kernel or reference)


@dataclass(frozen=True)
class SlotBinding:
    """The kernel of one slot.

    Attributes:
        path: FQN of the module.
        slot: name of the slot; "" for an op that is selected per model (attention).
        owner: class name of the module.
        resolution: the kernel and the reasons.
        wrappers: applied to the kernel, in this order.
        parts: of an op that is selected per model: FQNs of the modules in which the kernel runs.
        kept: of an op that is selected per model: why this one keeps Transformers' implementation, so that a kernel
            that is named serves other sub-models alone; "" where it does not.
    """

    path: str
    slot: str
    owner: str
    resolution: Resolution
    wrappers: tuple[Wrapper, ...] = ()
    parts: tuple[str, ...] = ()
    kept: str = ""

    @property
    def op(self) -> OpSpec:
        return KERNEL_REGISTRY.op(self.resolution.op_name)

    @property
    def key(self) -> str:
        """The name under which the module keeps the slot's wrappers."""
        return self.slot or self.op.name

    @property
    def field(self) -> str:
        """The configuration field that selects this kernel."""
        return self.op.field_of(self.resolution.variant)


@dataclass(frozen=True)
class SkippedPart:
    """A part of the architecture that an op might compute and that got no slot.

    Attributes:
        symbol, op, reason: as `Skipped` has them.
        modules: FQNs of the modules that it belongs to.
    """

    symbol: str
    op: str
    reason: str
    modules: tuple[str, ...]


class Absent(NamedTuple):
    """A kernel that was named for an op that the model does not have."""

    where: str
    op_name: str
    why: str


# A module's path, and what is wrong there.
_Problem = tuple[str, str]


@dataclass(frozen=True)
class Binding:
    """The kernel of every slot of a model; immutable, and without references to the model.

    Attributes:
        config: what it was resolved from.
        slots: by module FQN and slot.
        skipped: parts without a slot.
        absent: fields of `config` without effect.
        device: where the model runs.
        dtype: the requested compute dtype; None for that of each module's parameters.
        model_dtype: that of most modules, for display.
    """

    config: OpsImplementationConfig
    slots: tuple[SlotBinding, ...]
    skipped: tuple[SkippedPart, ...]
    absent: tuple[Absent, ...]
    device: DeviceFacts
    dtype: torch.dtype | None
    model_dtype: str

    def of(self, op_name: str) -> tuple[SlotBinding, ...]:
        """The slots of one op."""
        return tuple(slot for slot in self.slots if slot.op.name == op_name)

    def with_wrappers(self, choose: Callable[[SlotBinding], Wrapper | None]) -> Binding:
        """The binding with the wrapper that `choose` returns outermost in each slot, each only once."""

        def wrapped(slot: SlotBinding) -> SlotBinding:
            wrapper = choose(slot)
            if wrapper is None or any(known.name == wrapper.name for known in slot.wrappers):
                return slot
            return replace(slot, wrappers=(*slot.wrappers, wrapper))

        return replace(self, slots=tuple(map(wrapped, self.slots)))


def resolve(
    model: Any,
    ops: OpsImplementationConfig | dict[str, Any] | str | None = "auto",
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Binding:
    """Select the kernel of every slot of `model` without changing it. Arguments and errors are those of `bind`."""
    with _without_updates(model):
        return _resolve(model, OpsImplementationConfig.make(ops), device, dtype)


@contextlib.contextmanager
def _without_updates(model: Any) -> Iterator[None]:
    """Context in which reading parametrized weights, which are computed each time, changes no buffer.

    The power iteration of spectral norm does in training.
    """
    # Discovery imports this file, and does not need torch.
    from torch.nn.utils.parametrize import ParametrizationList

    lists = (module for module in model.modules() if isinstance(module, ParametrizationList))
    training = [module for found in lists for module in found.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _resolve(
    model: Any, config: OpsImplementationConfig, device: torch.device | str | None, dtype: torch.dtype | None
) -> Binding:
    facts, default_dtype = _placement(model, device, dtype)
    problems: list[_Problem] = []
    slots: list[SlotBinding] = []
    for at, request in kernel_requests(model, config, facts, dtype):
        op_name, variant = at.op_name, at.variant
        parts = () if at.name else _parts(model, at)
        problems += _partly_covered(config, at, parts)
        wanted = config.choice(op_name, variant, at.path, parts)
        keeps = None if at.name else _keeps(at, wanted)
        try:
            in_module = bool(at.name) or KERNEL_REGISTRY.op(op_name).per_module
            resolution = _resolve_at(request, wanted, keeps, in_module)
        except ProfileError:
            # The profile is wrong as a whole, so other slots would fail alike.
            raise
        except ConfigError as error:
            problems.append((at.path or type(model).__name__, str(error)))
            continue
        if config.is_from_preset(op_name, variant, at.path, parts):
            resolution = replace(resolution, by_preset=True, why="preset eager")
        wrappers = wrappers_of(at.module, at.name or at.op_name)
        slots.append(SlotBinding(at.path, at.name, class_name(at.module), resolution, wrappers, parts, keeps or ""))
    skipped = _skipped(model)
    absent = list(_absent(config, slots, skipped, problems))
    if problems:
        raise ConfigError(list_problems("kernels cannot be bound", _by_text(problems), shown=30))
    shown = "" if default_dtype is None else dtype_name(default_dtype)
    return Binding(config, tuple(slots), skipped, tuple(absent), facts, dtype, shown)


def kernel_requests(
    model: Any, config: OpsImplementationConfig, device: DeviceFacts, dtype: torch.dtype | None
) -> Iterator[tuple[ModuleSlot, KernelRequest]]:
    """Each place of a model where a kernel is selected, and what it is selected for.

    Args:
        dtype: of the computation; None is that of each module's parameters.
    """
    configs = _configs(model)
    usual = None if dtype is not None else _dtype_of(model)
    for at in (*walk_slots(model), *_without_attribute(model, config, configs)):
        computed = dtype or _dtype_of(at.module) or usual
        yield at, KernelRequest(at.op_name, at.variant, device, computed, at.module, _nearest(at.path, configs))


def original_class(module: Any) -> type:
    """The class that the module had before `fully_shard` replaced it."""
    from torch.distributed.fsdp import FSDPModule

    return next(cls for cls in type(module).__mro__ if not issubclass(cls, FSDPModule))


def class_name(module: Any) -> str:
    """The name of `original_class(module)`."""
    return original_class(module).__name__


def _without_attribute(model: Any, chosen: OpsImplementationConfig, configs: dict[str, Any]) -> Iterator[ModuleSlot]:
    """Ops that no slot is declared for.

    Those selected per model, such as attention, once for each sub-model with a config of its own; those selected per
    module, such as layer_norm, in every module; variants for which `auto` selects no kernel, such as linear/standard,
    where one is named.
    """
    for op in KERNEL_REGISTRY.ops.values():
        everywhere = {variant for variant in op.variants if KERNEL_REGISTRY.selected_by_auto(op.name, variant)}
        if op.applies_to is None or (op.per_module and not everywhere and not chosen.names_kernel(op)):
            continue
        seen: list[Any] = []
        for path, module in model.named_modules():
            variant = op.applies_to(module, _nearest(path, configs)) if op.per_module else op.applies_to(module)
            if variant is None:
                continue
            if op.per_module:
                if variant in everywhere or chosen.choice(op.name, variant, path) not in ("auto", "eager"):
                    yield ModuleSlot(path, module, "", op.name, variant)
            elif all(module.config is not config for config in seen):
                seen.append(module.config)
                yield ModuleSlot(path, module, "", op.name, variant)


def _parts(model: Any, at: ModuleSlot) -> tuple[str, ...]:
    """The modules in which the kernel of a per-model op runs: those whose config is the sub-model's."""
    part = KERNEL_REGISTRY.op(at.op_name).part
    if part is None:
        return ()
    configs = _configs(model)
    return tuple(
        path for path, module in model.named_modules() if part(module) and _nearest(path, configs) is at.module.config
    )


def _partly_covered(config: OpsImplementationConfig, at: ModuleSlot, parts: tuple[str, ...]) -> Iterator[_Problem]:
    """Overrides that name some modules of a sub-model, for an op whose kernel is that of all of them."""
    field = KERNEL_REGISTRY.op(at.op_name).field_of(at.variant)
    for glob, chosen in config.overrides.items():
        found = fnmatch.filter(parts, glob)
        if field in chosen and 0 < len(found) < len(parts) and not fnmatch.fnmatchcase(at.path, glob):
            text = (
                f"overrides[{glob!r}].{field}={chosen[field]!r}: {at.op_name} is selected for all modules of "
                f"{class_name(at.module)} together, because they share its masks, and the glob matches {len(found)} of "
                f"{len(parts)}; use {f'{at.path}.*' if at.path else '*'!r}"
            )
            yield at.path or "model", text


def _keeps(at: ModuleSlot, wanted: str) -> str | None:
    """Why a model keeps Transformers' implementation of a per-model op, or None."""
    keeps = KERNEL_REGISTRY.op(at.op_name).keeps
    reason = skip_reason(at.module, at.op_name)
    return reason or (keeps(at.module, attached(at.module).get(at.op_name), wanted) if keeps else None)


def _resolve_at(request: KernelRequest, wanted: str, keeps: str | None, in_module: bool) -> Resolution:
    """The registry's selection, except where the module itself rules kernels out.

    Args:
        in_module: the kernel is called in the module's own forward.
    """
    op = KERNEL_REGISTRY.op(request.op_name)
    variant = op.variant(request.variant)
    specs = KERNEL_REGISTRY.specs(request.op_name, request.variant)
    if wanted == "eager":
        return KERNEL_REGISTRY.resolve(request, wanted)
    named = wanted != "auto"
    # The kernel of a model's attention runs in the modules inside, whatever calls them.
    problem = keeps or (replaced_forward(request.module) if in_module else None)
    optional = keeps is not None or variant.extends is not None
    if problem is None and in_module:
        problem = _wrapper_problem(request.module)
    if problem is None and variant.check_module:
        problem = variant.check_module(request.module)
    if named and variant.extends and all(spec.name != wanted for spec in specs):
        problem = f"{wanted} has no form of it; the slots of {variant.extends} serve"
    if problem is None:
        return KERNEL_REGISTRY.resolve(request, wanted)
    if named and not optional:
        raise ConfigError(f"{op.field_of(request.variant)}={wanted!r}: {problem}; use eager or auto there")
    rejected = tuple((spec.name, problem) for spec in specs)
    return Resolution(request.op_name, request.variant, "eager", problem, rejected, False)


def _wrapper_problem(module: Any) -> str | None:
    """The first parameter of a module that kernels cannot read."""
    named = ((name, wrapper_class(parameter)) for name, parameter in module.named_parameters(recurse=False))
    return next((f"its {name} is stored as {found}" for name, found in named if found), None)


def _skipped(model: Any) -> tuple[SkippedPart, ...]:
    paths: dict[Skipped, list[str]] = {}
    for path, module in model.named_modules():
        for part in skipped_parts(type(module)):
            paths.setdefault(part, []).append(path)
    return tuple(SkippedPart(part.symbol, part.op, part.reason, tuple(found)) for part, found in paths.items())


def _absent(
    config: OpsImplementationConfig,
    slots: Iterable[SlotBinding],
    skipped: Iterable[SkippedPart],
    problems: list[_Problem],
) -> Iterator[Absent]:
    """Fields and overrides that name a kernel for nothing; an error in `problems` where that part was skipped."""
    for field, value in config.named_fields():
        op = _op_of(field)
        if value == "eager" or not op.bound_to_model:
            continue
        name = config.name_of(field)
        problem = _without_slot(field, name, value, "*", slots, skipped)
        if problem is None:
            yield Absent("-", op.name, f"{name}={value}, but this architecture has no such op")
        else:
            problems += problem
    for glob, chosen in config.overrides.items():
        for field, value in chosen.items():
            name = config.name_of(field)
            problem = _without_slot(field, name, value, glob, slots, skipped)
            if problem is None:
                why = f"overrides: {name}={value}, but no module path like this has the op"
                if value in ("auto", "eager"):
                    yield Absent(glob, _op_of(field).name, why)
                else:
                    known = [slot.path or "model" for slot in slots if slot.field == field]
                    have = f"; {known[0]} has it" if known else ""
                    problems.append((glob, f"{why}{have}"))
            elif value not in ("auto", "eager"):
                problems += [(path, f"{text} (in overrides[{glob!r}])") for path, text in problem]


def _without_slot(
    field: str, name: str, value: str, glob: str, slots: Iterable[SlotBinding], skipped: Iterable[SkippedPart]
) -> list[_Problem] | None:
    """Why a field reaches no slot at the modules that `glob` names, for each part; nothing where it reaches one.

    The texts call it `name`. Returns None where those modules have no such op at all.
    """
    of_field = [slot for slot in slots if slot.field == field and fnmatch.filter([slot.path, *slot.parts], glob)]
    if any(not slot.kept for slot in of_field):
        return []
    where = {(slot.path, slot.kept): "" for slot in of_field}
    if not of_field:
        for part in skipped:
            if _selected_by(field, part) and (found := fnmatch.filter(part.modules, glob)):
                where[found[0], part.reason] = f"{part.symbol} has no slot: "
    return [
        (path or "model", f"{name}={value!r}: {part}{why}; use eager or auto") for (path, why), part in where.items()
    ] or None


def _selected_by(field: str, part: SkippedPart) -> bool:
    """Whether `field` selects the kernel of a skipped part."""
    op, (op_name, _, variant) = _op_of(field), part.op.partition("/")
    return op_name == op.name and field == (op.field_of(variant) if variant in op.variants else op.config_field)


def _op_of(field: str) -> OpSpec:
    """The op that a configuration field selects for."""
    return next(
        op for op in KERNEL_REGISTRY.ops.values() if field in {op.config_field, *(op.field_of(v) for v in op.variants)}
    )


def _configs(model: Any) -> dict[str, Any]:
    """The config of each module, by path; None for a module without."""
    return {path: module.__dict__.get("config") for path, module in model.named_modules()}


def _nearest(path: str, configs: dict[str, Any]) -> Any:
    """The config of the innermost module that has one and that the module at `path` is, or is a part of."""
    while True:
        if configs.get(path) is not None:
            return configs[path]
        if not path:
            return next((config for config in configs.values() if config is not None), None)
        path = path.rpartition(".")[0]


def _placement(
    model: Any, device: torch.device | str | None, dtype: torch.dtype | None
) -> tuple[DeviceFacts, torch.dtype | None]:
    import torch

    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ConfigError(
            f"dtype={dtype!r} is not a floating dtype of torch", hint="pass torch.bfloat16, float16 or float32"
        )
    first = next(iter(model.parameters()), None)
    where = device if device is not None else (first.device if first is not None else "cpu")
    return facts_of(where), dtype or _dtype_of(model)


def _dtype_of(module: Any) -> torch.dtype | None:
    """The dtype of most elements of the parameters: a recurrence in bfloat16 may keep its decay in float32."""
    elements: Counter[torch.dtype] = Counter()
    for parameter in module.parameters():
        if parameter.dtype.is_floating_point:
            elements[parameter.dtype] += parameter.numel()
    return max(elements, key=elements.__getitem__, default=None)


def _by_text(problems: list[_Problem]) -> list[str]:
    """Each distinct problem once, with the first module that has it and the number of the others."""
    found: dict[str, list[str]] = {}
    for path, text in problems:
        found.setdefault(text, []).append(path)
    lines = []
    for text, paths in found.items():
        where = paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
        lines.append(f"{where}: {text}")
    return lines
