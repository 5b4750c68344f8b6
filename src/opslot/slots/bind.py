"""Bind a model's slots to kernels, say what was bound, and undo it."""

from __future__ import annotations

import copy
import dataclasses
import fnmatch
import reprlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from opslot._base.device import DeviceFacts, facts_of
from opslot._base.dtypes import dtype_name
from opslot._base.errors import ConfigError
from opslot._base.logging import get_logger
from opslot.slots.config import OpsImplementationConfig
from opslot.slots.op import OpSpec
from opslot.slots.profile import ProfileError, read_profile
from opslot.slots.registry import KERNEL_REGISTRY, Resolution
from opslot.slots.report import BindingReport, BindingRow
from opslot.slots.slot import PREFIX, BoundKernel, walk_slots
from opslot.slots.spec import KernelRequest

if TYPE_CHECKING:
    import torch

_STATE = "_opslot_state"

logger = get_logger(__name__)


class _Choice(NamedTuple):
    """What was chosen for one slot of one module; `slot` is empty for an op of the whole model."""

    path: str
    module: Any
    slot: str
    resolution: Resolution


def bind(
    model: Any,
    ops: OpsImplementationConfig | dict[str, Any] | str | None = "auto",
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> BindingReport:
    """Write the chosen kernel on every slot of `model`; all of them or, on an error, none.

    Args:
        model: a module whose submodules declare slots (a generated model, or classes with `OpSlot`s of your own).
        ops: a config, a mapping of its fields, "auto", "eager" or a preset.
        device: where the model will run; default where its first parameter is (meta: this machine's best device). A
            model that runs on another kind of device later chooses again there, before its first forward pass.
        dtype: compute dtype; default each module's own parameters', which autocast may differ from.

    Raises:
        ConfigError: `model` is no module; every slot that a named kernel cannot serve, with the reasons and the
            alternatives; a device or dtype that there is not.
    """
    require_module(model, "opslot.bind")
    config = OpsImplementationConfig.make(ops)
    facts, default_dtype = _placement(model, device, dtype)
    inner_models = _inner_models(model)
    configs = {path: _config_of(inner) for path, inner in inner_models.items()}
    problems: list[str] = []
    at_slots: list[_Choice] = []
    for path, module, slot, op_name, variant in walk_slots(model):
        number = dtype or _dtype_of(module) or default_dtype
        request = KernelRequest(op_name, variant, facts, number, module, next(iter(_around(path, configs)), None))
        try:
            wanted = config.choice(op_name, variant, path)
            at_slots.append(
                _Choice(path, module, slot, _resolve(request, wanted, module.__dict__.get("_opslot_unreached")))
            )
        except ProfileError:
            # The file's fault, not a slot's.
            raise
        except ConfigError as error:
            problems.append(f"{path or type(model).__name__}: {error}")
    of_model = _resolve_model_ops(inner_models, config, facts, default_dtype, problems)
    if problems:
        raise ConfigError(_collapse(problems))
    resolutions = [choice.resolution for choice in (*at_slots, *of_model)]
    kernels = {
        (r.op_name, r.variant, r.chosen): KERNEL_REGISTRY.load(r.op_name, r.variant, r.chosen)
        for r in resolutions
        if r.chosen != "eager"
    }
    unbind(model)
    for _, module, slot, r in at_slots:
        if r.chosen != "eager":
            kernel = kernels[r.op_name, r.variant, r.chosen]
            module.__dict__[PREFIX + slot] = BoundKernel(r.op_name, r.variant, r.chosen, r.explicit, kernel)
    report = BindingReport(
        (*_rows([*at_slots, *of_model]), *_absent_rows(config, [*at_slots, *of_model])),
        str(facts),
        note="" if all(r.explicit for r in resolutions) else str(read_profile(facts)),
        dtype=dtype_name(default_dtype) if default_dtype is not None else "",
    )
    model.__dict__[_STATE] = {
        "report": report,
        "config": config,
        "attached": _attach(inner_models, at_slots, of_model, kernels),
        "placement": (facts.torch_type, dtype),
        "watch": model.register_forward_pre_hook(_follow, with_kwargs=True),
    }
    return report


def _follow(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Choose again where a model has moved to another kind of device since it was bound.

    Without this, a model that was built on a CPU and moved to a GPU would train there with a CPU's kernels. Only
    parameters and inputs that agree count: offloaded parameters rest elsewhere than they compute.
    """
    import torch

    bound, dtype = model.__dict__[_STATE]["placement"]
    parameter = next(iter(model.parameters()), None)
    given = next((x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)), None)
    if parameter is None or given is None or parameter.device.type != given.device.type:
        return
    now = given.device.type
    if now not in (bound, "meta"):
        torch.compiler.disable(_bind_again)(model, bound, given.device, dtype)


def _bind_again(model: Any, bound: str, device: torch.device, dtype: torch.dtype | None) -> None:
    name = type(model).__name__
    logger.warning("%s was bound for %s and runs on %s: its kernels are chosen anew", name, bound, device.type)
    bind(model, model.__dict__[_STATE]["config"], device=device, dtype=dtype)


def unbind(model: Any) -> None:
    """Every slot of `model` back to eager, upstream's own code, and its attention and experts as they were."""
    state = model.__dict__.pop(_STATE, None)
    if state:
        state["watch"].remove()
        for path, op_name, previous in state["attached"]:
            detach = KERNEL_REGISTRY.op(op_name).detach
            if detach is not None:
                detach(model.get_submodule(path), previous)
    for _, module, slot, _, _ in walk_slots(model):
        module.__dict__.pop(PREFIX + slot, None)


def explain(model: Any) -> BindingReport:
    """The table of a bound model: site, op, variant, chosen, why, rejected and why.

    It says what runs now, also where `model.set_attn_implementation` or its like came after the binding. A model that
    was never bound answers with its slots on eager, or with none at all.

    Raises:
        ConfigError: `model` is no module.
    """
    require_module(model, "opslot.explain")
    for inner in model.modules():
        if _STATE in inner.__dict__:
            return _report_now(inner)
    unbound = [
        _Choice(path, module, slot, Resolution(op_name, variant, "eager", "not bound", (), False))
        for path, module, slot, op_name, variant in walk_slots(model)
    ]
    note = f"{type(model).__name__} has no slots; opslot.apply(model) gives it those of its architecture"
    return BindingReport(tuple(_rows(unbound)), note="" if unbound else note)


def _report_now(model: Any) -> BindingReport:
    """The report of the binding of `model`, with what was set on the model itself since."""
    state = model.__dict__[_STATE]
    rows = tuple(now for row in state["report"] for now in _row_now(row, model, state["attached"]))
    return state["report"] if rows == state["report"].rows else dataclasses.replace(state["report"], rows=rows)


def _row_now(row: BindingRow, model: Any, attached: list[tuple[str, str, Any]]) -> Iterator[BindingRow]:
    """`row`, in parts where not all of its modules run the same now."""
    op = KERNEL_REGISTRY.ops.get(row.op)
    inner = {path: held for path, op_name, held in attached if op_name == row.op}
    if not inner or op is None or op.replaced is None:
        yield row
        return
    paths: dict[str | None, list[str]] = {}
    for path in row.modules or ("",):
        around = (above for above in inner if _around(path, {above: None}))
        now = {op.replaced(model.get_submodule(above), inner[above], row.chosen) for above in around}
        paths.setdefault(next(iter(now - {None}), None), []).append(path)
    for name, where in paths.items():
        if name is None:
            yield row if len(paths) == 1 else dataclasses.replace(row, modules=tuple(where))
            continue
        chosen = "eager" if name == "eager" else "replaced"
        why = f"the model was set to Transformers' {name!r} after opslot bound {row.chosen}"
        yield dataclasses.replace(row, chosen=chosen, why=why, modules=_told(row.site, where))


def require_module(model: Any, caller: str) -> None:
    """Raise ConfigError, naming `caller`, for what is no torch module: a path, a dictionary, None."""
    from torch import nn

    if not isinstance(model, nn.Module):
        shown = reprlib.Repr()
        shown.maxstring = shown.maxother = 80
        raise ConfigError(
            f"{caller} takes a model, found {shown.repr(model)}",
            hint="make one first, e.g. with AutoModelForCausalLM.from_pretrained",
        )


def bound_config(model: Any) -> OpsImplementationConfig | None:
    """The config that `model` was bound with, or None."""
    state = model.__dict__.get(_STATE)
    return state["config"] if state else None


def own_config(model: Any) -> None:
    """Give `model` a copy of its Transformers config, so that models built from one config can be bound apart."""
    config = getattr(model, "config", None)
    if config is None or model.__dict__.get("_opslot_owns_config"):
        return
    copies: dict[int, Any] = {}
    copy.deepcopy(config, copies)
    for module in model.modules():
        held = module.__dict__.get("config")
        if held is not None and id(held) in copies:
            module.config = copies[id(held)]
            module.__dict__["_opslot_owns_config"] = True
    model.__dict__["_opslot_owns_config"] = True


def _inner_models(model: Any) -> dict[str, Any]:
    """By path, the outermost modules that ops of a whole model apply to; `model` itself where there are none.

    One inside a wrapper (PEFT, DDP), or several, such as a teacher and a student that one module holds.
    """
    per_model = [op.applies_to for op in KERNEL_REGISTRY.ops.values() if op.applies_to is not None]
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        if not _around(path, found) and any(applies(module) for applies in per_model):
            found[path] = module
    return found or {"": model}


def _around(path: str, outer: Mapping[str, Any]) -> list[Any]:
    """What `outer` holds, by path, for the modules that the one at `path` is, or is a part of."""
    return [held for above, held in outer.items() if not above or f"{path}.".startswith(f"{above}.")]


def _config_of(model: Any) -> Any:
    """Transformers config of `model`, or of the outermost part of it that has one; None where there is none."""
    return next((m.config for m in model.modules() if m.__dict__.get("config") is not None), None)


def _placement(
    model: Any, device: torch.device | str | None, dtype: torch.dtype | None
) -> tuple[DeviceFacts, torch.dtype | None]:
    import torch

    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ConfigError(f"dtype={dtype!r} is no floating dtype of torch; pass torch.bfloat16, float16 or float32")
    first = next(iter(model.parameters()), None)
    where = device if device is not None else (first.device if first is not None else "cpu")
    return facts_of(where), dtype or _dtype_of(model)


def _dtype_of(module: Any) -> torch.dtype | None:
    return next((p.dtype for p in module.parameters() if p.dtype.is_floating_point), None)


def _resolve(request: KernelRequest, wanted: str, problem: str | None = None) -> Resolution:
    """Like the registry's choice, but aware of what the module itself rules out; `problem` is known to do so."""
    variant = KERNEL_REGISTRY.op(request.op_name).variant(request.variant)
    specs = KERNEL_REGISTRY.specs(request.op_name, request.variant)
    named = wanted not in ("auto", "eager")
    if problem is None and variant.check_module:
        problem = variant.check_module(request.module)
    if named and variant.extends and all(spec.name != wanted for spec in specs):
        problem = f"{wanted} has no form of it; the slots of {variant.extends} serve"
    if problem is None:
        return KERNEL_REGISTRY.resolve(request, wanted)
    if named and not variant.extends:
        field = KERNEL_REGISTRY.op(request.op_name).field_of(request.variant)
        raise ConfigError(f"{field}={wanted!r}: {problem}; use eager or auto there")
    rejected = tuple((spec.name, problem) for spec in specs)
    return Resolution(request.op_name, request.variant, "eager", problem, rejected, wanted == "eager")


def _resolve_model_ops(
    inner_models: Mapping[str, Any],
    config: OpsImplementationConfig,
    facts: DeviceFacts,
    dtype: torch.dtype | None,
    problems: list[str],
) -> list[_Choice]:
    found = []
    for op in KERNEL_REGISTRY.ops.values():
        for path, inner in inner_models.items():
            if op.applies_to is None or not op.applies_to(inner):
                continue
            variant = next(iter(op.variants))
            request = KernelRequest(op.name, variant, facts, dtype, inner, _config_of(inner))
            try:
                resolution = _resolve(request, config.choice(op.name, variant, path))
                found.append(_Choice(path, inner, "", resolution))
            except ProfileError:
                raise
            except ConfigError as error:
                problems.append(f"{path}: {error}" if path else str(error))
    return found


def _attach(
    inner_models: Mapping[str, Any],
    at_slots: list[_Choice],
    of_model: list[_Choice],
    kernels: dict[tuple[str, str, str], Any],
) -> list[tuple[str, str, Any]]:
    """Tell the ops that prepare a model what was chosen; (path of the model, op, what undoes it)."""
    attached = []
    for path, inner in inner_models.items():
        inside = [c for c in at_slots if _around(c.path, {path: inner})]
        own = [c for c in of_model if c.path == path]
        for op_name, r in {c.resolution.op_name: c.resolution for c in (*inside, *own)}.items():
            attach = KERNEL_REGISTRY.op(op_name).attach
            if attach is not None:
                kernel = kernels.get((op_name, r.variant, r.chosen))
                attached.append((path, op_name, attach(inner, r.chosen, kernel)))
    return attached


def _rows(choices: list[_Choice]) -> list[BindingRow]:
    groups: dict[tuple[str, Resolution], list[str]] = {}
    for path, module, slot, r in choices:
        site = f"{type(module).__name__}.{slot}" if slot else "model"
        groups.setdefault((site, r), []).append(path)
    return [
        BindingRow(site, r.op_name, r.variant, r.chosen, r.why, r.rejected, _told(site, paths))
        for (site, r), paths in groups.items()
    ]


def _told(site: str, paths: list[str]) -> tuple[str, ...]:
    """Paths that a row shows: none for the one model that was bound itself."""
    return () if site == "model" and paths == [""] else tuple(paths)


def _absent_rows(config: OpsImplementationConfig, choices: list[_Choice]) -> list[BindingRow]:
    """Fields that name a kernel for an op that this architecture does not have, and overrides that reach no slot."""
    sites = [(path, KERNEL_REGISTRY.op(r.op_name).field_of(r.variant)) for path, _, _, r in choices]
    present = {field for _, field in sites}
    rows = []
    for field, value in config.named_fields():
        op = _op_of(field)
        if value != "eager" and field not in present and op.bound_to_model:
            why = f"{field}={value}, but this architecture has no such op"
            rows.append(BindingRow("-", op.name, "-", "absent", why, ()))
    for glob, chosen in config.overrides.items():
        for field, value in chosen.items():
            if not any(field == own and fnmatch.fnmatchcase(path, glob) for path, own in sites):
                why = f"overrides: {field}={value}, but no such slot is at a module path like this"
                rows.append(BindingRow(glob, _op_of(field).name, "-", "absent", why, ()))
    return rows


def _op_of(field: str) -> OpSpec:
    """The op that a configuration field chooses for."""
    return next(
        op for op in KERNEL_REGISTRY.ops.values() if field in {op.config_field, *(op.field_of(v) for v in op.variants)}
    )


def _collapse(problems: list[str]) -> str:
    """One line per distinct problem; the same problem in 48 layers is told once, with the count."""
    told: dict[str, list[str]] = {}
    for problem in problems:
        path, separator, text = problem.partition(": ")
        told.setdefault(text if separator else problem, []).append(path)
    lines = []
    for text, paths in told.items():
        where = paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
        lines.append(f"- {where}: {text}")
    return "kernels cannot be bound:\n" + "\n".join(lines)
