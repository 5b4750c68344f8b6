"""Generated modules of code outside Transformers: only what edits changed, in classes that derive from the originals.

A module of Transformers is generated whole. Another one may register its classes, or be a script that trains, so
nothing of it runs again.
"""

from __future__ import annotations

import ast
import re
from typing import Any

import libcst as cst

from opslot.patchgen.edited_module import EditedModule
from opslot.patchgen.own_code import changing_decorator
from opslot.patchgen.tree import block_of, is_docstring, replace_nodes, walk

_ORIGINAL = "_opslot_original"
# Around the changes. The original is imported already, except where a generated module is imported by its name.
_HEAD = """
import importlib as _opslot_importlib

from opslot.patchgen.live_globals import make_classes as _opslot_make_classes

_opslot_original = _opslot_importlib.import_module(MODULE)
_opslot_source = DIGEST


def _opslot_make(_opslot_original):
    pass


_opslot_classes = _opslot_make_classes(_opslot_make, _opslot_original, __name__)
"""


def keep_changes(edited: EditedModule) -> None:
    """Leave only changed and added code in the module."""
    upstream = edited.upstream
    known = {_code(node) for node in cst.parse_module(upstream.text).body}
    body: list[Any] = []
    for node in edited.module.body:
        name = node.name.value if isinstance(node, cst.ClassDef | cst.FunctionDef) else ""
        original = upstream.symbol(name) if name else None
        if original is not None and not upstream.is_own(name):
            continue
        if isinstance(node, cst.ClassDef) and original is not None:
            changed = _changed_class(edited, node)
            body += [] if changed is None else [changed]
        elif _code(node) not in known:
            body.append(node)
    edited.module = edited.module.with_changes(header=[], body=body, footer=[])


def make_of_original(edited: EditedModule) -> None:
    """Put the changes into a function that runs with the globals of the original module.

    In their methods, all names mean what they mean there whenever they are read, also those of the changed classes.
    """
    names = [node.name.value for node in edited.module.body if isinstance(node, cst.ClassDef) and _is_changed(node)]
    classes = ", ".join(f"{name!r}: {name}" for name in names)
    end = [f"_opslot_classes = {{{classes}}}", *(f"{name} = {_ORIGINAL}.{name}" for name in names)]
    made = [*edited.module.body, *cst.parse_module("\n".join([*end, "return _opslot_classes"])).body]
    future = [ast.unparse(node) for node in edited.upstream.tree.body if _is_future(node)]
    head = _HEAD.replace("MODULE", repr(edited.upstream.name)).replace("DIGEST", repr(edited.upstream.digest))
    body = [
        node.with_changes(body=cst.IndentedBlock(body=made)) if isinstance(node, cst.FunctionDef) else node
        for node in cst.parse_module("\n".join([*future, head])).body
    ]
    edited.module = edited.module.with_changes(body=body)


def _is_changed(node: cst.ClassDef) -> bool:
    """Whether `_changed_class` made a class."""
    owners = (base.value.value for base in node.bases if isinstance(base.value, cst.Attribute))
    return any(isinstance(owner, cst.Name) and owner.value == _ORIGINAL for owner in owners)


def _is_future(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"


def _changed_class(edited: EditedModule, node: cst.ClassDef) -> cst.ClassDef | None:
    """A class that derives from the original and has only what edits changed or added; None where nothing is."""
    name = node.name.value
    definition, symbol = edited.upstream.find(name), edited.upstream.symbol(name)
    assert isinstance(definition, ast.ClassDef)
    assert symbol is not None
    (original,) = cst.parse_module(symbol.text).body
    known = {_code(statement) for statement in _statements(original)}
    changed = [x for x in _statements(node) if _code(x) not in known and not is_docstring(x)]
    wraps = changing_decorator(definition)
    if wraps or any(ast.unparse(decorator).startswith("use_experts_") for decorator in definition.decorator_list):
        # The decorator may dispatch to the original's methods.
        changed = [x for x in changed if not isinstance(x, cst.FunctionDef)]
    if wraps:
        changed = [x for x in changed if not re.match(r"_opslot_slots = |_opslot_\w+ = None", _code(x))]
    if not changed:
        return None
    kept = [_with_own_super(x, name) if isinstance(x, cst.FunctionDef) else x for x in changed]
    base = cst.Arg(cst.Attribute(cst.Name(_ORIGINAL), cst.Name(name)))
    body = cst.IndentedBlock(body=kept)
    bare = node.with_changes(decorators=[], keywords=[], lpar=cst.LeftParen(), rpar=cst.RightParen())
    return bare.with_changes(bases=[base], body=body)


def _statements(definition: cst.CSTNode) -> list[Any]:
    """The statements in the body of a class."""
    whole = block_of(definition)
    assert isinstance(whole, cst.ClassDef)
    return list(whole.body.body)


def _with_own_super(method: cst.FunctionDef, owner: str) -> cst.FunctionDef:
    """The method with `super()` naming the original class, after which the next one is that of the original's base."""
    parameters = [*method.params.posonly_params, *method.params.params]
    if not parameters:
        return method
    named = cst.parse_expression(f"super({_ORIGINAL}.{owner}, {parameters[0].name.value})")
    calls = (node for node in walk(method) if isinstance(node, cst.Call) and not node.args)
    return replace_nodes(
        method, {id(call): named for call in calls if isinstance(call.func, cst.Name) and call.func.value == "super"}
    )


def _code(node: cst.CSTNode) -> str:
    """The source of a statement without the comments and blank lines above it."""
    bare = node.with_changes(leading_lines=[]) if hasattr(node, "leading_lines") else node
    return cst.Module([]).code_for_node(bare).strip()
