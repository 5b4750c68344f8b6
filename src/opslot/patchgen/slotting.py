"""Edits that put a slot in front of a method, or on the calls of a function."""

from __future__ import annotations

import ast
import textwrap

import libcst as cst

from opslot.patchgen.anchoring import Swaps, replace_match, rewrite
from opslot.patchgen.edited_module import EditedModule
from opslot.patchgen.edits import Decorate, Edit, SlotCalls, SlotLoss, SlotMethod, TakeKeywords
from opslot.patchgen.fingerprint import fingerprint
from opslot.patchgen.forms import ModuleView
from opslot.patchgen.fused_loss import UnknownLossError
from opslot.patchgen.losses import loss_region, loss_statements
from opslot.patchgen.pattern import PatternMatch, compile_pattern, find_matches
from opslot.patchgen.tree import is_docstring, names_below, splice


def apply_slot_method(edit: SlotMethod, edited: EditedModule) -> None:
    method = edited.get(edit.target, edit)
    assert isinstance(method, cst.FunctionDef)
    class_name, _, method_name = edit.target.partition(".")
    expect_fingerprint(edited, edit, edit.target, edit.expects)
    edited.declare(class_name, edit.slot, edit)
    if edit.outside_decorators:
        _slot_outside_decorators(edit, edited, method)
        return
    call = f"if self.{edit.slot.attribute} is not None:\n    return {_result(edit)}\n"
    new = cst.parse_module(call).body
    edited.sign(edit, new)
    block = method.body
    assert isinstance(block, cst.IndentedBlock)
    start = 1 if is_docstring(block.body[0]) else 0
    edited.put(edit.target, method.with_changes(body=splice(block, start, start, new, edited.mark(edit))))
    edited.note(edit.target, f"slot {edit.slot} in front of {method_name}")


def _slot_outside_decorators(edit: SlotMethod, edited: EditedModule, method: cst.FunctionDef) -> None:
    """After the class, put a function around whatever the decorators left as the method."""
    if edit.parameters:
        _insert_below(edit, edited, "*arguments, **options", "*arguments, **options", edit.parameters)
        return
    params = method.params
    names = [parameter.name.value for parameter in params.params[1:]]
    plain = not (params.kwonly_params or params.star_kwarg or params.posonly_params)
    if not plain or isinstance(params.star_arg, cst.Param):
        raise edited.fail(edit, "only plain parameters can be passed on outside the decorators", show=edit.target)
    _insert_below(edit, edited, ", ".join(map(_bare, params.params[1:])), ", ".join(names))


def _insert_below(
    edit: SlotMethod, edited: EditedModule, taken: str, passed: str, parameters: tuple[str, ...] = ()
) -> None:
    """Put the function around the method below its class.

    Args:
        taken, passed: the function's parameters, and the method's arguments, after `self`.
        parameters: names for the arguments of a call while a kernel is bound.
    """
    class_name, _, method_name = edit.target.partition(".")
    named = f"        {', '.join(parameters)} = arguments\n" if parameters else ""
    text = (
        f"_opslot_dispatch_{class_name} = {class_name}.{method_name}\n\n\n"
        f"def _opslot_{method_name}_{class_name}(self, {taken}):\n"
        f"    if self.{edit.slot.attribute} is not None:\n"
        f"{named}"
        f"        return {_result(edit)}\n"
        f"    return _opslot_dispatch_{class_name}(self, {passed})\n\n\n"
        f"{class_name}.{method_name} = _opslot_{method_name}_{class_name}\n"
    )
    first, *others = cst.parse_module(text).body
    new = [first.with_changes(leading_lines=[cst.EmptyLine(indent=False)] * 2), *others]
    edited.sign(edit, new)
    index = edited.index(class_name)
    assert index is not None
    edited.module = splice(edited.module, index + 1, index + 1, new, edited.mark(edit))
    edited.note(class_name, f"slot {edit.slot} outside the decorators of {method_name}, below the class")


def _result(edit: SlotMethod) -> str:
    """What the method returns while a kernel is bound."""
    return edit.returns.format(call=f"self.{edit.slot.attribute}({edit.args})")


def _bare(parameter: cst.Param) -> str:
    """A parameter's name and default, without its annotation."""
    name = parameter.name.value
    return f"{name}={cst.Module([]).code_for_node(parameter.default)}" if parameter.default else name


def apply_slot_calls(edit: SlotCalls, edited: EditedModule) -> None:
    edited.get(edit.target, edit)
    for symbol, allowed in edit.expects:
        expect_fingerprint(edited, edit, symbol, allowed)
    routed = cst.parse_expression(f"(self.{edit.slot.attribute} or {edit.target})")
    call = compile_pattern(f"{edit.target}($*arguments)")
    called = set(edit.target.split("."))
    total = 0
    for class_name, method_name in _methods(edited.module):
        symbol = f"{class_name}.{method_name}"
        method = edited.get(symbol, edit)
        assert isinstance(method, cst.FunctionDef)
        if not called <= names_below(method):
            continue
        found = find_matches(call, method.body)
        if not found:
            continue
        total += len(found)
        edited.declare(class_name, edit.slot, edit)
        if [parameter.name.value for parameter in method.params.params][:1] != ["self"]:
            raise edited.fail(edit, f"{symbol} has no `self` to hold the slot", show=symbol)
        swaps: Swaps = {}
        for match in found:
            assert isinstance(match.expression, cst.Call)
            new: cst.CSTNode = match.expression.with_changes(func=routed.deep_clone())
            edited.sign(edit, [new], list(match.expression.args))
            swaps[id(match)] = [new]
        edited.put(symbol, rewrite(edit, edited, method, found, swaps))
        edited.note(symbol, f"slot {edit.slot} on the call of {edit.target}")
    if total == 0 or (edit.count is not None and total != edit.count):
        expected = "at least one" if edit.count is None else edit.count
        raise edited.fail(edit, f"{expected} call(s) of {edit.target} in methods expected, {total} found")


def apply_slot_loss(edit: SlotLoss, edited: EditedModule) -> None:
    class_name = edit.target.split(".")[0]
    method = edited.get(edit.target, edit)
    block = method.body
    assert isinstance(block, cst.IndentedBlock)
    init = edited.find(f"{class_name}.__init__")
    try:
        constructor = _as_ast(init) if init is not None else None
        region = loss_region(_as_ast(method), constructor, class_name, ModuleView(edited.upstream).classes)
    except UnknownLossError as reason:
        raise edited.fail(edit, f"it {reason}", show=edit.target) from None
    match = PatternMatch(block, region.start, region.stop)
    swaps = {id(match): replace_match(edit, edited, match, loss_statements(region, edit.slot))}
    edited.put(edit.target, rewrite(edit, edited, method, [match], swaps))
    edited.note(edit.target, edit.summary)
    edited.declare(class_name, edit.slot, edit)


def apply_decorate(edit: Decorate, edited: EditedModule) -> None:
    method = edited.get(edit.target, edit)
    new = cst.Decorator(cst.Name(edit.decorator))
    edited.sign(edit, [new])
    edited.put(edit.target, method.with_changes(decorators=[new, *method.decorators]))
    edited.imports[edit.decorator] = f"from {edit.module} import {edit.decorator}"
    edited.note(edit.target, edit.summary)


def apply_take_keywords(edit: TakeKeywords, edited: EditedModule) -> None:
    method = edited.get(edit.target, edit)
    assert isinstance(method, cst.FunctionDef)
    if method.params.star_kwarg is not None:
        raise edited.fail(edit, "it takes any keyword argument already", show=edit.target)
    new = cst.Param(cst.Name("kwargs"))
    edited.put(edit.target, method.with_changes(params=method.params.with_changes(star_kwarg=new)))
    edited.note(edit.target, edit.summary)


def _as_ast(node: cst.CSTNode) -> ast.FunctionDef:
    definition = ast.parse(textwrap.dedent(cst.Module([]).code_for_node(node))).body[0]
    assert isinstance(definition, ast.FunctionDef)
    return definition


def _methods(module: cst.Module) -> list[tuple[str, str]]:
    return [
        (node.name.value, child.name.value)
        for node in module.body
        if isinstance(node, cst.ClassDef)
        for child in node.body.body
        if isinstance(child, cst.FunctionDef)
    ]


def expect_fingerprint(edited: EditedModule, edit: Edit, symbol: str, allowed: tuple[str, ...]) -> None:
    """Raise unless upstream's `symbol` is one of the bodies that the slot may replace."""
    if not allowed:
        return
    found = fingerprint(edited.upstream.require(symbol).text)
    if found not in allowed:
        raise edited.fail(
            edit,
            f"{symbol} computes something else than the patch was written for: fingerprint {found}, expected"
            f" {' or '.join(allowed)}; if the slot's op still means the same, add the new fingerprint",
            show=symbol,
        )
