"""A patch as the text of a patch file: `models/<arch>/patch.py`, or a module for the `patchgen` command."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from opslot.patchgen.classifier_losses import classifier_form
from opslot.patchgen.config import PatchConfig
from opslot.patchgen.edits import (
    Anchored,
    ClassAttribute,
    ConfigSlot,
    Decorate,
    Edit,
    Exclude,
    InheritMethod,
    Slot,
    SlotCalls,
    SlotLoss,
    SlotMethod,
    TakeKeywords,
    UndecoratedCopy,
)
from opslot.patchgen.primitives import ExternalReplacement, Replacement

_REPLACEMENTS = {
    "class": "replace_class",
    "function": "replace_function",
    "method": "override_method",
    "init": "modify_init",
}


def patch_source(patch: PatchConfig) -> str:
    """Source text of a module whose `patch` has the same edits and adds nothing to them by discovery."""
    kept = {"target_file": patch.target_file, "description": patch.description, "discover": False}
    external = ", create_patch_from_external" if any(isinstance(e, ExternalReplacement) for e in patch.edits) else ""
    lines = [
        f'"""Slots of {patch.source_module}."""\n',
        f"from opslot.patchgen import PatchConfig, Slot{external}\n",
        f"patch = {_call('PatchConfig', patch.source_module, **kept)}",
    ]
    lines += map(_method_call, patch.edits)
    lines += _module_parts(patch)
    return "\n".join(lines) + "\n"


def _module_parts(patch: PatchConfig) -> Iterator[str]:
    for spec in patch.additional_imports:
        options = {key: value for key, value in (("names", list(spec.names)), ("alias", spec.alias)) if value}
        yield _call("patch.add_import", spec.module, **options)
    if patch.dropped_imports:
        yield _call("patch.drop_import_names", *patch.dropped_imports)
    for method, texts in (
        ("add_post_import_block", patch.post_import_blocks),
        ("add_helper", patch.helpers),
        ("add_final_block", patch.final_blocks),
    ):
        yield from (_call(f"patch.{method}", text) for text in texts)
    for dependency in dict.fromkeys(patch.dependencies):
        module, _, symbol = dependency.rpartition(":")
        yield _call("patch.depends_on", module, symbol)


def _method_call(edit: Edit) -> str:
    """The call of a method of `PatchConfig` that makes an edit."""
    match edit:
        case SlotMethod():
            options = _options(edit, "args", "returns", "expects", "outside_decorators", "parameters")
            return _call("patch.slot_method", edit.target, edit.slot, **options)
        case SlotCalls():
            options = _options(edit, "count")
            if edit.expects:
                options["expects"] = dict(edit.expects)
            return _call("patch.slot_calls", edit.target, edit.slot, **options)
        case ConfigSlot():
            return _call("patch.slot_config", (edit.target, *edit.others), edit.slot, **_options(edit, "depends"))
        case SlotLoss():
            return _call("patch.slot_loss", edit.target, edit.slot)
        case Anchored():
            return _anchored_call(edit)
        case InheritMethod():
            return _call("patch.inherit_method", edit.target, edit.from_module, edit.from_symbol)
        case UndecoratedCopy():
            return _call("patch.copy_undecorated", edit.target, edit.name)
        case Exclude():
            return _call("patch.exclude_from_output", *edit.whole)
        case Decorate():
            return _call("patch.decorate", edit.target, edit.module, edit.decorator)
        case TakeKeywords():
            return _call("patch.take_keywords", edit.target)
        case ClassAttribute():
            return _call("patch.set_attribute", edit.target, edit.attribute, edit.value)
        case Replacement():
            options = {"name_map": dict(edit.name_map)} if edit.name_map else {}
            return _call(f"patch.{_REPLACEMENTS[edit.kind]}", edit.target, edit.text, **options, **_described(edit))
        case ExternalReplacement():
            made = _call(
                "create_patch_from_external", edit.target, edit.source_module, edit.source_name, **_described(edit)
            )
            return f"patch.edits.append({made})"
        case _:
            raise TypeError(f"{type(edit).__name__} can't be written to a patch file")


def _anchored_call(edit: Anchored) -> str:
    slot = edit.slot
    if slot is not None:
        if (*edit.patterns, edit.template) == classifier_form(edit.target, slot):
            return _call("patch.slot_loss", edit.target, slot)
        start, end = f"self.{slot.attribute}(", f") if self.{slot.attribute} is not None else $match"
        if edit.template.startswith(start) and edit.template.endswith(end):
            args = edit.template.removeprefix(start).removesuffix(end)
            return _call("patch.slot_expr", edit.target, slot, *edit.patterns, args=args, **_options(edit, "count"))
    options = _options(edit, "count", "note", "slot")
    patterns = edit.patterns if len(edit.patterns) > 1 else edit.patterns[0]
    return _call(f"patch.{edit.mode}", edit.target, patterns, edit.template, **options)


def _options(edit: Edit, *names: str) -> dict[str, Any]:
    """The fields of an edit that do not have their default."""
    defaults = {field.name: field.default for field in fields(edit)}
    return {name: value for name in names if (value := getattr(edit, name)) != defaults[name]}


def _described(edit: Edit) -> dict[str, str]:
    return {"description": edit.note} if edit.note else {}


def _call(function: str, *args: Any, **options: Any) -> str:
    parts = [*map(_literal, args), *(f"{name}={_literal(value)}" for name, value in options.items())]
    line = f"{function}({', '.join(parts)})"
    if len(line) <= 120 and "\n" not in line:
        return line
    return "\n".join([f"{function}(", *(f"    {part}," for part in parts), ")"])


def _literal(value: Any) -> str:
    if isinstance(value, Slot):
        named = f", name={value.name!r}" if value.name else ""
        return f"Slot({value.op!r}, {value.variant!r}{named})"
    if isinstance(value, str) and "\n" in value and '"""' not in value and "\\" not in value:
        end = "" if value.endswith("\n") else "\\\n"
        return f'"""\\\n{value}{end}"""'
    return repr(value)
