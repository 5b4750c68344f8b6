"""Brings an inherited method's upstream text into a generated class."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator

import libcst as cst

from opslot.patchgen.edited_module import EditedModule
from opslot.patchgen.edits import InheritMethod
from opslot.patchgen.tree import Node, replace_nodes, walk
from opslot.patchgen.upstream import UpstreamModule


def apply_inherit_method(edit: InheritMethod, edited: EditedModule) -> None:
    holder = edited.get(edit.target.split(".")[0], edit)
    assert isinstance(holder, cst.ClassDef)
    owner = edit.from_symbol.split(".")[0]
    bases = {base.value.value for base in holder.bases if isinstance(base.value, cst.Name)}
    if owner not in bases:
        raise edited.fail(edit, f"{holder.name.value} does not inherit from {owner}", show=holder.name.value)
    if edited.find(edit.target) is not None:
        raise edited.fail(edit, f"{edit.target} is defined by the class itself", show=edit.target)
    module = edited.release.module(edit.from_module)
    text = textwrap.dedent(module.require(edit.from_symbol).text)
    method = _super_kept(cst.parse_module(text).body[0], owner)
    edited.put(edit.target, method.with_changes(leading_lines=[cst.EmptyLine(indent=False)]))
    edited.note(edit.target, f"text of {edit.from_module}.{edit.from_symbol}")
    _import_names(text, module, edited, edit)


def _super_kept(method: Node, owner: str) -> Node:
    """A bare `super()` means the next class after its own; in another class it has to name its own."""
    spelled = cst.parse_expression(f"super({owner}, self)")
    return replace_nodes(
        method,
        {
            id(node): spelled
            for node in walk(method)
            if isinstance(node, cst.Call)
            and isinstance(node.func, cst.Name)
            and node.func.value == "super"
            and not node.args
        },
    )


def _import_names(text: str, module: UpstreamModule, edited: EditedModule, edit: InheritMethod) -> None:
    """Import what the method's text takes from its own module's globals."""
    theirs = module_bindings(module)
    ours = module_bindings(edited.upstream)
    used = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
    for name in sorted(used & theirs.keys()):
        statement = theirs[name]
        if name not in ours:
            edited.imports[name] = statement
        elif not _same_object(ours[name], statement):
            raise edited.fail(edit, f"{name} is `{ours[name]}` here and `{statement}` in {edit.from_module}")


def module_bindings(module: UpstreamModule) -> dict[str, str]:
    """For each global name of a module, an absolute import statement that binds it."""
    return {name: statement for node in module.tree.body for name, statement in _bound_by(node, module)}


def _bound_by(node: ast.stmt, module: UpstreamModule) -> Iterator[tuple[str, str]]:
    """The names that a statement of a module binds."""
    match node:
        case ast.ImportFrom():
            source = absolute_name(module.package, node.level, node.module)
            for alias in node.names:
                renamed = f" as {alias.asname}" if alias.asname else ""
                yield alias.asname or alias.name, f"from {source} import {alias.name}{renamed}"
        case ast.Import():
            for alias in node.names:
                top = alias.name.split(".")[0]
                yield (
                    (alias.asname, f"import {alias.name} as {alias.asname}") if alias.asname else (top, f"import {top}")
                )
        case ast.FunctionDef() | ast.ClassDef():
            yield node.name, f"from {module.name} import {node.name}"
        case ast.Assign() | ast.AnnAssign():
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from ((x.id, f"from {module.name} import {x.id}") for x in targets if isinstance(x, ast.Name))


def absolute_name(package: str, level: int, name: str | None) -> str:
    """The absolute name of `from {'.' * level}{name} import ...` written in a module of `package`."""
    if level == 0:
        assert name is not None
        return name
    parts = package.split(".")
    parts = parts[: len(parts) - level + 1]
    return ".".join([*parts, name] if name else parts)


def _same_object(first: str, second: str) -> bool:
    """Whether two import statements surely bind one object."""
    interchangeable = {"import torch.nn as nn", "from torch import nn"}
    loggers = first.endswith("import logger") and second.endswith("import logger")
    return first == second or {first, second} <= interchangeable or loggers or _exported_again(first, second)


def _exported_again(first: str, second: str) -> bool:
    """Whether one statement takes a name from a package and the other the same name from a module in that package."""
    (outer, name), (inner, same) = sorted((_source_of(first), _source_of(second)))
    return bool(outer) and name == same and inner.startswith(f"{outer}.")


def _source_of(statement: str) -> tuple[str, str]:
    """Module and name of a from-import, empty for another statement."""
    words = statement.split()
    return (words[1], " ".join(words[3:])) if words[0] == "from" else ("", "")
