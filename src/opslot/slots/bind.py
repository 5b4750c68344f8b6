"""Bind a model's slots to kernels, explain the result, and undo it."""

from __future__ import annotations

import copy
import reprlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from opslot._base.errors import ConfigError
from opslot._base.logging import get_logger
from opslot.slots.binding import Binding, SlotBinding, class_name, resolve
from opslot.slots.config import OpsImplementationConfig
from opslot.slots.profile import read_profile
from opslot.slots.protocol import (
    attached,
    binding_state,
    bound_kernel,
    is_wrapped,
    modules_by_document,
    owns_config,
    padding_read_around,
    padding_read_outside,
    set_kernel,
    set_wrappers,
    walk_slots,
    why_by_document,
)
from opslot.slots.registry import KERNEL_REGISTRY, Resolution
from opslot.slots.replaced_forwards import replaced_since_binding, watch_named_kernels
from opslot.slots.replaced_methods import replaced_since_apply
from opslot.slots.report import BindingReport, Runs, make_report, rows_of
from opslot.slots.slot import BoundKernel

if TYPE_CHECKING:
    import torch

logger = get_logger(__name__)


@dataclass
class _Written:
    """What `write` leaves on a model.

    Attributes:
        runs: by module path and slot, which of Transformers' implementations ran then.
        watch: the hook that re-binds the model on another device.
        checked: whether a call in training showed which named kernels run where forwards were replaced.
    """

    binding: Binding
    runs: Runs
    report: BindingReport
    watch: Any
    checked: bool = False


# A module, a slot of it, and what that will hold.
_Placed = tuple[Any, SlotBinding, Callable[..., Any] | None]


def bind(
    model: Any,
    ops: OpsImplementationConfig | dict[str, Any] | str | None = "auto",
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> BindingReport:
    """Write the selected kernel into every slot of `model`; all of them or, on an error, none.

    A model that is bound already is bound again; what `opslot.parallelize` applied to its kernels stays.

    Args:
        model: a module whose submodules declare slots (a generated model, or classes with `OpSlot`s of your own).
        ops: a config, a mapping of its fields, "auto", "eager" or a preset.
        device: where the model will run; default where its first parameter is (meta: this machine's best device). A
            model that runs on another kind of device later is bound again for it, before its first forward pass.
        dtype: compute dtype; default each module's own parameters', which autocast may differ from.

    Raises:
        ConfigError: `model` is not a module; every slot that a named kernel cannot serve, with the reasons and the
            alternatives; an unknown device or dtype.
    """
    require_module(model, "opslot.bind")
    return write(model, resolve(model, ops, device=device, dtype=dtype))


def write(model: Any, binding: Binding) -> BindingReport:
    """Put the kernels of `binding` into `model`; on an error, the model keeps the kernels it had."""
    for problem in replaced_since_apply(model):
        logger.warning("%s", problem)
    placed = [_place(model, slot) for slot in binding.slots]
    before = [(module, state.binding) for module in model.modules() if (state := binding_state(module)) is not None]
    _take_down(model)
    try:
        _put(model, binding, placed)
    except Exception:
        _take_down(model)
        for module, old in before:
            _put(module, old, [_place(module, slot) for slot in old.slots])
        raise
    return binding_state(model).report


def _place(model: Any, slot: SlotBinding) -> _Placed:
    module, selected = model.get_submodule(slot.path), slot.resolution
    kernel: Callable[..., Any] | None = None
    if selected.chosen != "eager":
        kernel = KERNEL_REGISTRY.load(selected.op_name, selected.variant, selected.chosen)
        if slot.slot or slot.op.per_module:
            kernel = BoundKernel(
                selected.op_name, selected.variant, selected.chosen, selected.explicit, kernel, slot.path
            )
    reference = slot.op.variant(selected.variant).reference
    for wrapper in slot.wrappers:
        kernel = wrapper.wrap(module, kernel, reference)
    return module, slot, kernel


def _put(model: Any, binding: Binding, placed: list[_Placed]) -> None:
    # What an op sets on a config must not reach models that were built from the same one.
    for holder in list(config_holders(model)) or [model]:
        own_config(holder)
    attach: list[tuple[Any, list[SlotBinding], Callable[..., Any] | None]] = []
    of_op: dict[str, list[SlotBinding]] = {}
    for module, slot, kernel in placed:
        set_wrappers(module, slot.key, slot.wrappers)
        if slot.slot:
            set_kernel(module, slot.slot, kernel)
            # Ops selected per module attach to those without slots alone.
            if not slot.op.per_module:
                of_op.setdefault(slot.op.name, []).append(slot)
        else:
            attach.append((module, [slot], kernel))
    for module, slots, kernel in (*((model, slots, None) for slots in of_op.values()), *attach):
        op = slots[0].op
        if module is not model and not op.per_module:
            padding_read_outside.set(module, padding_read_around(model, module))
        if op.attach is not None:
            attached.set(module, {**attached(module), op.name: op.attach(module, slots, kernel)})
    runs = _runs(model, binding)
    profile = "" if all(s.resolution.explicit for s in binding.slots) else str(read_profile(binding.device))
    notes = [op.note(model) for op in KERNEL_REGISTRY.ops.values() if op.note is not None]
    note = "\n".join(line for line in (profile, *notes, _by_document(model)) if line)
    watch = model.register_forward_pre_hook(_follow, with_kwargs=True)
    binding_state.set(model, _Written(binding, runs, make_report(binding, runs, runs, note), watch))


def _take_down(model: Any) -> None:
    """Undo what `_put` did to `model` and to the models in it, the innermost first; wrappers stay."""
    for module in reversed(list(model.modules())):
        if (state := binding_state(module)) is not None:
            state.watch.remove()
            binding_state.set(module, None)
        for op_name, undo in attached(module).items():
            detach = KERNEL_REGISTRY.op(op_name).detach
            if detach is not None:
                detach(module, undo)
        attached.set(module, {})
    for _, module, slot, _, _ in walk_slots(model):
        set_kernel(module, slot, None)


def _runs(model: Any, binding: Binding) -> Runs:
    """Which of Transformers' implementations each op that has several would run now."""
    found: dict[tuple[str, str], str | None] = {}
    for slot in binding.slots:
        runs = slot.op.runs
        # A kernel in a slot runs before Transformers' dispatch.
        if runs is not None and (not slot.slot or slot.resolution.chosen == "eager"):
            found[slot.path, slot.key] = runs(model.get_submodule(slot.path))
    return found


def _follow(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook: bind again where a model has moved to another kind of device since it was bound.

    Without this, a model that was built on a CPU and moved to a GPU would train there with a CPU's kernels. Only
    the device of both parameters and inputs counts: offloaded parameters are stored elsewhere than they compute, and
    integer inputs may be on the host.
    """
    import torch

    state = binding_state(model)
    if not state.checked and model.training and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        state.checked = watch_named_kernels(model, kwargs)
    bound = state.binding.device.torch_type
    parameter = next(iter(model.parameters()), None)
    given = [x.device.type for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
    if parameter is None or not given:
        return
    now = parameter.device.type
    if (now in given or now != "cpu") and now not in (bound, "meta"):
        torch.compiler.disable(_bind_again)(model, bound, parameter.device)


def _bind_again(model: Any, bound: str, device: torch.device) -> None:
    name, binding = type(model).__name__, binding_state(model).binding
    logger.warning("%s was bound for %s and runs on %s: re-selecting its kernels", name, bound, device.type)
    bind(model, binding.config, device=device, dtype=binding.dtype)


def unbind(model: Any) -> None:
    """Return every slot of `model` to Transformers' implementation, and its attention and experts to what they were.

    Raises:
        ConfigError: the model is parallelized, and would compute something else without its wrappers.
    """
    if is_wrapped(model):
        raise ConfigError(
            f"{class_name(model)} is parallelized, and Transformers' own code would not compute the same over ranks",
            hint="bind it to eager, opslot.bind(model, 'eager'), or build the model again",
        )
    _take_down(model)
    for module in model.modules():
        padding_read_outside.set(module, None)


def _by_document(model: Any) -> str:
    """A line on modules that run once for each packed document, and why."""
    modules = ((type(module).__name__, why_by_document(module)) for _, module in modules_by_document(model))
    found = Counter(f"{name}: one call for each packed document, since {why}" for name, why in modules)
    return "\n".join(line.replace(":", f" x{count}:", 1) if count > 1 else line for line, count in found.items())


def explain(model: Any) -> BindingReport:
    """The table of a bound model: slot, op, kernel, why, what was rejected and why, and the parts without a slot.

    It shows what runs now, also where `model.set_attn_implementation` or the like was called after binding, and the
    modules whose forward was replaced since. A model that was never bound gives its slots on eager, or none at all; a
    part of a bound one, such as what PEFT's `merge_and_unload` returns, the kernels in its slots without the reasons.

    Raises:
        ConfigError: `model` is not a module.
    """
    require_module(model, "opslot.explain")
    for inner in model.modules():
        if (state := binding_state(inner)) is not None:
            now, replaced, old = _runs(inner, state.binding), replaced_since_binding(inner), replaced_since_apply(inner)
            if now == state.runs and not replaced and not old:
                return state.report
            note = "\n".join(filter(None, [state.report.note, *old]))
            return make_report(state.binding, state.runs, now, note, replaced)
    unbound = tuple(
        SlotBinding(path, slot, class_name(module), _held(module, slot, op_name, variant))
        for path, module, slot, op_name, variant in walk_slots(model)
    )
    note = "" if unbound else f"{type(model).__name__} has no slots; opslot.apply(model) adds those of its architecture"
    return BindingReport(tuple(rows_of(unbound, {}, {}, {})), note=note)


def _held(module: Any, slot: str, op_name: str, variant: str) -> Resolution:
    """What is in a slot of a module that is in no bound model, but may have been bound in one."""
    kernel = bound_kernel(module, slot)
    if kernel is None:
        return Resolution(op_name, variant, "eager", "not bound", (), False)
    name = getattr(kernel, "name", "wrapped")
    return Resolution(op_name, variant, name, "bound in a larger model, which has the reasons", (), False)


def require_module(model: Any, caller: str) -> None:
    """Raise ConfigError, naming `caller`, for anything but a torch module: a path, a dictionary, None."""
    from torch import nn

    if not isinstance(model, nn.Module):
        shown = reprlib.Repr()
        shown.maxstring = shown.maxother = 80
        raise ConfigError(
            f"{caller} takes a model, found {shown.repr(model)}",
            hint="make one first, e.g. with AutoModelForCausalLM.from_pretrained",
        )


def binding_of(model: Any) -> tuple[Any, Binding] | None:
    """The outermost bound module in `model`, which may be inside a wrapper such as PEFT's, and its binding."""
    states = ((module, binding_state(module)) for module in model.modules())
    return next(((module, state.binding) for module, state in states if state is not None), None)


def bound_config(model: Any) -> OpsImplementationConfig | None:
    """The config that `model` was bound with, or None."""
    found = binding_of(model)
    return found[1].config if found else None


def own_config(model: Any) -> None:
    """Give `model` a copy of its Transformers config, so that models of one config can run different kernels."""
    config = getattr(model, "config", None)
    if config is None or owns_config(model):
        return
    copies: dict[int, Any] = {}
    copy.deepcopy(config, copies)
    for module in model.modules():
        held = module.__dict__.get("config")
        if held is not None and id(held) in copies:
            module.config = copies[id(held)]
            owns_config.set(module, True)
    owns_config.set(model, True)


def config_holders(model: Any) -> Iterator[Any]:
    """Outermost Transformers models in `model`: a PEFT or DDP wrapper is looked through."""
    prefixes: list[str] = []
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{p}." if p else "") for p in prefixes)
        if not inside and module.__dict__.get("config") is not None and hasattr(module, "get_input_embeddings"):
            prefixes.append(path)
            yield module
