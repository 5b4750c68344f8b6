"""A patch as the text of a patch file: `models/<arch>/patch.py`, or a module for the `patchgen` command."""

from __future__ import annotations

from collections.abc import Iterator
from functools import singledispatch
from typing import Any

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
    UndecoratedCopy,
)
from opslot.patchgen.losses import classifier_form


def patch_source(patch: PatchConfig) -> str:
    """Source text of a module whose `patch` has the same edits and adds nothing to them by discovery."""
    kept = {"target_file": patch.target_file, "description": patch.description, "discover": False}
    lines = [
        f'"""Slots of {patch.source_module}."""\n',
        "from opslot.patchgen import PatchConfig, Slot\n",
        f"patch = {_call('PatchConfig', patch.source_module, **kept)}",
    ]
    for edit in patch.edits:
        name, args, options = _written(edit)
        lines.append(_call(f"patch.{name}", *args, **{key: value for key, value in options.items() if value}))
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


_Written = tuple[str, tuple[Any, ...], dict[str, Any]]


@singledispatch
def _written(edit: Edit) -> _Written:
    """The method of `PatchConfig` that makes an edit, its arguments and its options."""
    raise TypeError(f"{type(edit).__name__} can't be written to a patch file")


@_written.register
def _(edit: SlotMethod) -> _Written:
    options = {"args": edit.args, "expects": list(edit.expects), "outside_decorators": edit.outside_decorators}
    return "slot_method", (edit.target, edit.slot), options


@_written.register
def _(edit: SlotCalls) -> _Written:
    expects = {name: list(hashes) for name, hashes in edit.expects}
    return "slot_calls", (edit.target, edit.slot), {"expects": expects, "count": edit.count}


@_written.register
def _(edit: ConfigSlot) -> _Written:
    return "slot_config", ([edit.target, *edit.others], edit.slot), {"depends": list(edit.depends)}


@_written.register
def _(edit: SlotLoss) -> _Written:
    return "slot_loss", (edit.target, edit.slot), {}


@_written.register
def _(edit: Anchored) -> _Written:
    slot, count = edit.slot, edit.count if edit.count != 1 else None
    if slot is not None:
        if (*edit.patterns, edit.template) == classifier_form(edit.target, slot):
            return "slot_loss", (edit.target, slot), {}
        start, end = f"self.{slot.attribute}(", f") if self.{slot.attribute} is not None else $match"
        if edit.template.startswith(start) and edit.template.endswith(end):
            args = edit.template.removeprefix(start).removesuffix(end)
            return "slot_expr", (edit.target, slot, edit.patterns[0]), {"args": args, "count": count}
    options = {"count": count, "note": edit.note, "slot": slot}
    return edit.mode, (edit.target, list(edit.patterns), edit.template), options


@_written.register
def _(edit: InheritMethod) -> _Written:
    return "inherit_method", (edit.target, edit.from_module, edit.from_symbol), {}


@_written.register
def _(edit: UndecoratedCopy) -> _Written:
    return "copy_undecorated", (edit.target, edit.name), {}


@_written.register
def _(edit: Exclude) -> _Written:
    return "exclude_from_output", edit.whole, {}


@_written.register
def _(edit: Decorate) -> _Written:
    return "decorate", (edit.target, edit.module, edit.decorator), {}


@_written.register
def _(edit: ClassAttribute) -> _Written:
    return "set_attribute", (edit.target, edit.attribute, edit.value), {}


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
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str) and "\n" in value[0]:
        value = value[0]
    if isinstance(value, str) and "\n" in value and '"""' not in value and "\\" not in value:
        return f'"""\\\n{value}\n"""'
    return repr(value)
