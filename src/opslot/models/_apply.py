"""Add opslot's slots to an existing Transformers model, and remove them again."""

from __future__ import annotations

import copy
import types
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

from opslot._base.errors import ConfigError, list_problems
from opslot._base.logging import get_logger
from opslot._base.source import source_of
from opslot.models._own_classes import (
    binds,
    class_made_from,
    for_replaced_forward,
    overridden,
    own_slots,
    with_slots,
)
from opslot.models._registry import architecture_of
from opslot.patchgen.materialization import REGISTERED_PATCHES
from opslot.patchgen.names import architecture_in
from opslot.patchgen.own_code import has_own_kernels
from opslot.slots import KERNEL_REGISTRY, BindingReport, OpsImplementationConfig, bind, unbind, walk_slots
from opslot.slots.bind import binding_of, require_module
from opslot.slots.binding import resolve
from opslot.slots.protocol import (
    ADOPT,
    Skipped,
    copy_upstream_globals,
    derived_from,
    original_of,
    replaced_forward,
    skipped_parts,
)
from opslot.slots.replaced_forwards import replaced_by

if TYPE_CHECKING:
    import torch

logger = get_logger(__name__)

_HOOK = "accelerate.hooks.add_hook_to_module"


def apply(
    model: Any,
    ops: OpsImplementationConfig | dict[str, Any] | str | None = "auto",
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> BindingReport:
    """Bind kernels to a model that Transformers, TRL, PEFT or Accelerate made.

    Module instances move to the generated classes of their architecture; parameters, buffers, hooks and optimizer
    references stay as they are. Either everything is bound or, on an error, nothing is changed.

    Args:
        model: any module that contains modules in whose code slots are found, of Transformers' classes or of others
            whose source is available; `opslot discover` shows them.
        ops: a config, a mapping of its fields, "auto", "eager" or a preset.
        device, dtype: where and in what the model will compute, when that differs from where it is now.

    Returns:
        The table that `opslot.explain(model)` returns too.

    Raises:
        ConfigError: `model` is not a module, has nothing to bind, or a named kernel cannot be bound.
    """
    require_module(model, "opslot.apply")
    config = OpsImplementationConfig.make(ops)
    moves = _plan_moves(model)
    already = has_generated_classes(model)
    if not _may_bind(moves) and not already:
        if binding_of(model) is not None or _selects_any(model, config, device, dtype):
            return bind_everywhere(model, config, device=device, dtype=dtype)
        raise nothing_to_bind(model)
    _copy_shared_activations(model)
    _report_unread(model)
    _report_constructors(moves)
    for module, old, new in moves:
        _give_class(module, old, new)
    try:
        report = bind(model, config, device=device, dtype=dtype)
    except Exception:
        _undo(moves)
        raise
    for module, _, new in moves:
        if hasattr(new, ADOPT):
            getattr(module, ADOPT)()
    from opslot.models._hooks import require_log_probs
    from opslot.models._multimodal.host_inputs import keep_inputs_on_host, reads_host_inputs
    from opslot.models._multimodal.modalities import keep_documents_from_towers
    from opslot.models._sequence.by_document import give_documents
    from opslot.models._sequence.packed_documents import separate_documents

    if reads_host_inputs(model):
        keep_inputs_on_host(model)
    keep_documents_from_towers(model)
    give_documents(model)
    separate_documents(model)
    require_log_probs(model)
    return report


def _copy_shared_activations(model: Any) -> None:
    """Give the model copies of the activations that all models of the process share, as OpenAI GPT's do."""
    from transformers import activations

    shared = {id(value) for value in vars(activations).values()}
    copies: dict[int, Any] = {}
    for parent in model.modules():
        for name, child in [*parent._modules.items()]:
            if child is not None and id(child) in shared:
                copies.setdefault(id(child), copy.deepcopy(child))
                setattr(parent, name, copies[id(child)])


def bind_everywhere(
    model: Any, ops: OpsImplementationConfig, *, device: torch.device | str | None, dtype: torch.dtype | None
) -> BindingReport:
    """Bind the kernels that torch's own modules take, in a model in whose code no slots were found (DeBERTa-v2).

    Raises:
        ConfigError: a kernel is named for code that keeps Transformers' implementation.
    """
    problems = [
        f"{part.op} of {part.symbol} has no slot: it {part.reason}"
        for part in _without_slots(model)
        if ops.names_kernel(KERNEL_REGISTRY.op(part.op.partition("/")[0]))
    ]
    if problems:
        raise ConfigError(list_problems("kernels cannot be bound", problems), hint="use eager or auto for these ops")
    _copy_shared_activations(model)
    return bind(model, ops, device=device, dtype=dtype)


def _selects_any(
    model: Any, ops: OpsImplementationConfig, device: torch.device | str | None, dtype: torch.dtype | None
) -> bool:
    """Whether any module of a model without slots gets a kernel, such as a layer norm."""
    return any(
        slot.op.per_module and slot.resolution.chosen != "eager"
        for slot in resolve(model, ops, device=device, dtype=dtype).slots
    )


def nothing_to_bind(model: Any) -> ConfigError:
    """The error for a model in which there is nothing to bind, with what keeps its implementation and why."""
    return ConfigError(
        f"opslot found nothing to bind in {type(model).__name__} ({type(model).__module__})",
        found="; ".join(["no module in whose code slots were found", *_skips(model)]),
        hint=(
            "see what `opslot discover ARCHITECTURE` finds; a class with code of another form declares its slots "
            "with OpSlot (docs/architectures.md); OPSLOT_BACKEND=hf trains it as it is"
        ),
    )


def _skips(model: Any) -> list[str]:
    """What keeps its implementation in the modules of a model without slots, and why."""
    found = [f"{part.op} of {part.symbol}: it {part.reason}" for part in _without_slots(model)]
    problems = [problem for cls in _classes(model) if (problem := own_slots(cls).problem)]
    packages = {cls.__module__.partition(".")[0] for cls in _classes(model) if has_own_kernels(cls.__module__)}
    kernels = [f"classes of {package} call its own kernels, and are not searched" for package in sorted(packages)]
    return list(dict.fromkeys([*found, *problems, *kernels]))


def _without_slots(model: Any) -> Iterator[Skipped]:
    """The parts that keep their implementation in the modules of a model."""
    from opslot.models.discovery.engine import discover

    for cls in _classes(model):
        arch = architecture_in(cls.__module__)
        own = with_slots(cls)
        skips = discover(arch).skips if arch is not None else ()
        parts = [Skipped(skip.op, skip.symbol, skip.reason) for skip in skips] if own is None else skipped_parts(own)
        yield from (part for part in parts if part.symbol.partition(".")[0] == cls.__name__)


def _classes(model: Any) -> dict[Any, None]:
    return dict.fromkeys(type(module) for module in model.modules())


def _report_unread(model: Any) -> None:
    """Log why the code of classes was not read."""
    for cls in _classes(model):
        if problem := own_slots(cls).problem:
            _warn_of_unread(problem)


@cache
def _warn_of_unread(problem: str) -> None:
    logger.warning(
        "%s; it keeps its own code, and has no kernels except in slots that it declares with OpSlot", problem
    )


def _report_constructors(moves: list[tuple[Any, type, type]]) -> None:
    """Log which constructors that a registered patch changes have not run, since the instances are older."""
    missed = []
    for old, new in dict.fromkeys((old, new) for _, old, new in moves):
        architecture = architecture_of(new, generated=True)
        patch = REGISTERED_PATCHES.get(architecture.name) if architecture is not None else None
        if patch is None:
            continue
        changed = {symbol for edit in patch.edits for symbol in edit.symbols}
        before = {cls.__name__: _constructor(cls) for cls in old.__mro__}
        missed += [
            name
            for cls in new.__mro__
            if (name := f"{cls.__name__}.__init__") in changed
            or (cls.__name__ in changed and _constructor(cls) != before.get(cls.__name__))
        ]
    if missed:
        logger.warning(
            "the registered patch changes %s, which has run before without the change, so attributes may be "
            "missing; opslot.build_foundation_model makes models with it",
            ", ".join(dict.fromkeys(missed)),
        )


def _constructor(cls: Any) -> str:
    return source_of(cls.__init__)


def _give_class(module: Any, old: type, new: type) -> None:
    for base in new.__mro__:
        if (architecture := architecture_of(base, generated=True)) is not None:
            copy_upstream_globals(architecture.upstream, base.__module__)
    module.__class__ = new
    if derived_from(new) is not None:
        _record_outputs_of(module)
    problem = overridden(new)
    if "forward" in module.__dict__ and not _move_hooked_forward(module, old, new):
        module.__class__ = for_replaced_forward(new)
        problem = f"forward was replaced on this instance before opslot.apply, by {replaced_by(module)}"
    replaced_forward.set(module, problem)


def _move_hooked_forward(module: Any, old: type, new: type) -> bool:
    """Let the hook of Accelerate that replaced a module's forward call that of the new class; False without one.

    It calls `_old_forward`, a method of the class that the module had, where `super()` would fail.
    """
    if not _hooks_forward_of(module, old):
        return False
    module._old_forward = types.MethodType(new.forward, module)  # type: ignore[attr-defined]
    return replaced_by(module) == _HOOK


def _hooks_forward_of(module: Any, cls: type) -> bool:
    """Whether the forward that Accelerate's hook calls is that of the class."""
    hooked: Any = module.__dict__.get("_old_forward")
    return getattr(hooked, "__func__", None) is getattr(cls, "forward", None) and hooked.__self__ is module


def _calls_generated_forward(module: Any) -> bool:
    """Whether the forward of an instance was replaced after `apply`, and so may call that of the generated class."""
    if "forward" not in module.__dict__ or replaced_forward(module) is not None:
        return False
    return replaced_by(module) != _HOOK or not _hooks_forward_of(module, type(module))


def restore(model: Any) -> Any:
    """Undo `apply`: Transformers' own classes, attention and experts again; weights untouched. Returns `model`.

    A module whose forward was replaced after `apply`, as by TRL's trainers, Accelerate's mixed precision or
    `torch.compile`, keeps its generated class: that forward calls the class's, which fails in an instance of another
    class. Without kernels it is Transformers' code.

    Raises:
        ConfigError: `model` is not a module, or is parallelized.
    """
    require_module(model, "opslot.restore")
    unbind(model)
    from opslot.models._hooks import remove_hooks

    remove_hooks(model)
    for module in model.modules():
        architecture = architecture_of(type(module), generated=True)
        original = architecture.upstream_class(type(module).__name__) if architecture is not None else None
        original = original or derived_from(type(module))
        if original is not None and not _calls_generated_forward(module):
            _move_hooked_forward(module, type(module), original)
            module.__class__ = original
            replaced_forward.set(module, None)
            _record_outputs_of(module)
    return model


def _record_outputs_of(module: Any) -> None:
    """Register what the class can record (router logits), as Transformers does when one is constructed."""
    recorded = getattr(module, "_can_record_outputs", None)
    if recorded is not None:
        from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

        dict.__setitem__(_CAN_RECORD_REGISTRY, str(type(module)), recorded)


def has_slots(model: Any) -> bool:
    """Whether `apply` would find anything to bind in `model`."""
    return _may_bind(_plan_moves(model)) or has_generated_classes(model)


def _may_bind(moves: list[tuple[Any, type, type]]) -> bool:
    """Whether kernels may be bound to any of the modules; not where opslot only knows why there are no slots."""
    return any(derived_from(new) is None or binds(new) for _, _, new in moves)


def has_generated_classes(model: Any) -> bool:
    """Whether a model has slots already, or only attention that is selected through its config."""
    generated = (architecture_of(cls, generated=True) for module in model.modules() for cls in type(module).__mro__)
    return next(walk_slots(model), None) is not None or any(found is not None for found in generated)


def _plan_moves(model: Any) -> list[tuple[Any, type, type]]:
    """(module, class now, class with slots) for every module of a class in whose architecture there are any."""
    moves: list[tuple[Any, type, type]] = []
    known: dict[type, type | None] = {}
    for path, module in model.named_modules():
        cls: Any = type(module)
        if cls not in known:
            known[cls] = _class_for(path, cls)
        if (new := known[cls]) is not None:
            moves.append((module, cls, new))
    return moves


def _class_for(path: str, cls: type) -> type | None:
    """The class that modules of a class get, with slots if it has any; None where it is that class."""
    from torch.distributed.fsdp import FSDPModule

    if issubclass(cls, FSDPModule):
        _check_sharded(path, cls)
        return None
    # Methods may have been replaced since the last call.
    original = derived_from(cls) or original_of(cls) or cls
    new = class_made_from(original) or original
    return None if new is cls else new


def _check_sharded(path: str, cls: type) -> None:
    """Raise for a class that FSDP2 derived from one with slots, which an instance has to keep."""
    if derived_from(cls) is not None:
        return
    bases: tuple[Any, ...] = cls.__mro__
    if any(architecture_of(base, generated=False) or with_slots(base) for base in bases):
        raise ConfigError(
            f"{path or 'the model'} is sharded already ({cls.__name__})",
            hint="call opslot.apply before fully_shard",
        )


def _undo(moves: list[tuple[Any, type, type]]) -> None:
    for module, old, new in moves:
        _move_hooked_forward(module, new, old)
        module.__class__ = old
        replaced_forward.set(module, None)
