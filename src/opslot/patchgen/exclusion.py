"""Leaves classes and functions out, with everything that only they used."""

from __future__ import annotations

from collections.abc import Sequence

import libcst as cst

from opslot.patchgen.edited_module import EditedModule
from opslot.patchgen.edits import Exclude
from opslot.patchgen.tree import Node, Replacements, names_below, replace_nodes, walk


def apply_exclusions(edits: Sequence[Exclude], edited: EditedModule) -> None:
    """Remove what all `edits` name, together: symbols of one may use those of another.

    Raises:
        PatchError: a symbol does not exist, or what stays in the module uses it.
    """
    authors = {name: edit for edit in edits for name in edit.whole}
    for name, edit in authors.items():
        edited.get(name, edit)
    before = _references(edited.module)
    for name in authors:
        _remove(edited, name)
        _drop_isinstance_branches(edited, name)
    left = _references(edited.module)
    while dead := [name for name in _definitions(edited.module) if before.get(name) and not left.get(name)]:
        exported = _exported(edited.module)
        dead = [name for name in dead if name not in exported]
        if not dead:
            break
        for name in dead:
            _remove(edited, name)
        left = _references(edited.module)
    for name, edit in authors.items():
        if users := left.get(name):
            raise edited.fail(
                edit,
                f"{name} is still used by {', '.join(sorted(users))}; patch or exclude these too",
                show=min(users),
            )


def _remove(edited: EditedModule, name: str) -> None:
    index = edited.index(name)
    if index is None:
        return
    body = list(edited.module.body)
    del body[index]
    edited.module = edited.module.with_changes(body=body)
    _drop_from_all(edited, name)


def _definitions(module: cst.Module) -> list[str]:
    return [node.name.value for node in module.body if isinstance(node, cst.FunctionDef | cst.ClassDef)]


def _references(module: cst.Module) -> dict[str, set[str]]:
    """For each name, the top-level definitions (or `the module`) that mention it."""
    found: dict[str, set[str]] = {}
    for node in module.body:
        owner = node.name.value if isinstance(node, cst.FunctionDef | cst.ClassDef) else "the module"
        if owner == "the module" and _is_all(node):
            continue
        for name in names_below(node) - {owner}:
            found.setdefault(name, set()).add(owner)
    return found


def _drop_isinstance_branches(edited: EditedModule, name: str) -> None:
    """Drop `if isinstance(x, name)` branches, and the name from tuples of classes."""
    body = list(edited.module.body)
    for index, node in enumerate(body):
        while name in names_below(node) and (swap := _next_swap(node, name)):
            node = replace_nodes(node, swap)
        if node is not body[index]:
            body[index] = _filled(node)
    edited.module = edited.module.with_changes(body=body)


def _next_swap(root: cst.CSTNode, name: str) -> Replacements | None:
    """A change that takes one mention of the class out of the isinstance tests below `root`."""
    nodes = list(walk(root))
    elifs = {id(node.orelse) for node in nodes if isinstance(node, cst.If)}
    for node in nodes:
        if isinstance(node, cst.If):
            below = node.orelse
            if isinstance(below, cst.If) and _tested_class(below.test) == name:
                return {id(node): node.with_changes(orelse=below.orelse)}
            if _tested_class(node.test) == name and id(node) not in elifs:
                return {id(node): _without_first_branch(node)}
        elif isinstance(node, cst.Call) and _is_isinstance(node) and isinstance(node.args[1].value, cst.Tuple):
            classes = node.args[1].value
            kept = [element for element in classes.elements if not _is_name(element.value, name)]
            if kept and len(kept) < len(classes.elements):
                return {id(classes): classes.with_changes(elements=kept) if len(kept) > 1 else kept[0].value}
    return None


def _without_first_branch(node: cst.If) -> cst.CSTNode | Sequence[cst.CSTNode]:
    rest = node.orelse
    if rest is None:
        return []
    if isinstance(rest, cst.If):
        return rest.with_changes(leading_lines=node.leading_lines)
    return list(rest.body.body)


def _filled(node: Node) -> Node:
    """Give blocks that lost every statement a `pass`."""
    empty = {
        id(child): child.with_changes(body=[cst.SimpleStatementLine([cst.Pass()])])
        for child in walk(node)
        if isinstance(child, cst.IndentedBlock) and not child.body
    }
    return replace_nodes(node, empty) if empty else node


def _tested_class(test: cst.BaseExpression) -> str | None:
    if isinstance(test, cst.Call) and _is_isinstance(test) and isinstance(test.args[1].value, cst.Name):
        return test.args[1].value.value
    return None


def _is_isinstance(call: cst.Call) -> bool:
    return _is_name(call.func, "isinstance") and len(call.args) == 2


def _is_name(node: cst.CSTNode, value: str) -> bool:
    return isinstance(node, cst.Name) and node.value == value


def _is_all(statement: cst.CSTNode) -> bool:
    if not isinstance(statement, cst.SimpleStatementLine) or not isinstance(statement.body[0], cst.Assign):
        return False
    return _is_name(statement.body[0].targets[0].target, "__all__")


def _exported(module: cst.Module) -> set[str]:
    return {
        str(node.evaluated_value)
        for statement in module.body
        if _is_all(statement)
        for node in walk(statement)
        if isinstance(node, cst.SimpleString)
    }


def _drop_from_all(edited: EditedModule, name: str) -> None:
    for index, statement in enumerate(edited.module.body):
        if _is_all(statement):
            swaps: Replacements = {
                id(node): []
                for node in walk(statement)
                if isinstance(node, cst.Element)
                and isinstance(node.value, cst.SimpleString)
                and node.value.evaluated_value == name
            }
            if swaps:
                body = list(edited.module.body)
                body[index] = replace_nodes(statement, swaps)
                edited.module = edited.module.with_changes(body=body)
