"""Edits that put a patch's own text in the place of upstream's."""

from __future__ import annotations

import difflib

import libcst as cst

from opslot._base.errors import PatchError
from opslot._base.logging import get_logger
from opslot.patchgen.edited_module import EditedModule
from opslot.patchgen.edits import Edit, NameMap, UndecoratedCopy, rename
from opslot.patchgen.primitives import ExternalReplacement, Replacement
from opslot.patchgen.tree import block_of, is_docstring, replace_nodes, splice, walk

logger = get_logger(__name__)

# Similarity of names, by difflib, from which one is taken for a misspelling of the other: above that of
# get_image_features and get_video_features.
_MISSPELLED = 0.85


def apply_replacement(edit: Replacement, edited: EditedModule) -> None:
    if edit.kind == "init":
        _extend_init(edit, edited)
        return
    new = _definition(edit, edit.text, edit.name_map)
    owner, _, method = edit.target.partition(".")
    new = new.with_changes(name=cst.Name(method or owner))
    summary = edit.summary
    if edit.kind == "method":
        cls = edited.get(owner, edit)
        old = edited.find(edit.target)
        if isinstance(old, cst.FunctionDef):
            comments = [line for line in new.leading_lines if line.comment]
            new = new.with_changes(decorators=old.decorators, leading_lines=[*old.leading_lines, *comments])
        else:
            new = new.with_changes(leading_lines=[cst.EmptyLine(indent=False), *new.leading_lines])
            summary = edit.note or f"add method {edit.target}"
            _warn_of_misspelling(cls, method)
    else:
        old = edited.get(edit.target, edit)
        comments = [line for line in new.leading_lines if line.comment]
        new = new.with_changes(leading_lines=[*old.leading_lines, *comments])
    edited.sign(edit, [new])
    edited.put(edit.target, new)
    edited.note(edit.target, f"{summary} (Patch.{edited.number(edit)})")


def _warn_of_misspelling(cls: cst.FunctionDef | cst.ClassDef, method: str) -> None:
    """Warn where a class has no method of that name, but one whose name differs by a few letters."""
    own = [node.name.value for node in cls.body.body if isinstance(node, cst.FunctionDef)]
    # A class may inherit these two, which nearly all modules have.
    similar = difflib.get_close_matches(method, [*own, "forward", "__init__"], n=1, cutoff=_MISSPELLED)
    if similar and similar[0] != method:
        logger.warning("class %s has no method %r, so it was added; did you mean %r?", cls.name.value, method, *similar)


def apply_external(edit: ExternalReplacement, edited: EditedModule) -> None:
    old = edited.get(edit.target, edit)
    renamed = "" if edit.source_name == edit.target else f" as {edit.target}"
    (line,) = cst.parse_module(
        f"# [PATCHED: {edit.summary}]\nfrom {edit.source_module} import {edit.source_name}{renamed}  # noqa: E402\n"
    ).body
    assert isinstance(line, cst.SimpleStatementLine)
    line = line.with_changes(leading_lines=[*old.leading_lines, *line.leading_lines])
    index = edited.index(edit.target)
    assert index is not None
    edited.module = splice(edited.module, index, index + 1, [line], edited.mark(edit))


def _extend_init(edit: Replacement, edited: EditedModule) -> None:
    target = f"{edit.target}.__init__"
    init = edited.get(target, edit)
    assert isinstance(init, cst.FunctionDef)
    assert isinstance(init.body, cst.IndentedBlock)
    added = block_of(_definition(edit, edit.text, edit.name_map)).body
    statements = [statement for statement in added.body if not is_docstring(statement)]
    calls = [index for index, statement in enumerate(statements) if _calls(statement, "original_init")]
    body = init.body
    if calls:
        before, after = statements[: calls[0]], statements[calls[0] + 1 :]
    else:
        before, after = [], statements
    end = len(body.body)
    if not calls and _calls(body.body[-1], "post_init"):
        end -= 1
    start = 1 if is_docstring(body.body[0]) else 0
    edited.sign(edit, statements)
    if after:
        body = splice(body, end, end, after, edited.mark(edit))
    if before:
        body = splice(body, start, start, before, edited.mark(edit))
    edited.put(target, init.with_changes(body=body))
    edited.note(target, edit.summary)


def _definition(edit: Edit, text: str, name_map: NameMap) -> cst.FunctionDef | cst.ClassDef:
    """The replacement's definition, its comments above kept, with names mapped."""
    module = cst.parse_module(text)
    definitions = [node for node in module.body if isinstance(node, cst.FunctionDef | cst.ClassDef)]
    if len(definitions) != 1:
        raise PatchError(
            f"{edit.summary}: the replacement is not one class or function",
            found=f"{len(definitions)} definitions",
            hint="add others with add_helper",
        )
    definition = definitions[0].with_changes(
        leading_lines=[*(line for line in module.header if line.comment), *definitions[0].leading_lines]
    )
    return map_names(definition, name_map) if name_map else definition


def map_names(root: cst.FunctionDef | cst.ClassDef, name_map: NameMap) -> cst.FunctionDef | cst.ClassDef:
    """Swap a prefix in every identifier, and in annotations written as strings."""
    swaps: dict[int, cst.CSTNode] = {}
    for node in walk(root):
        if isinstance(node, cst.Name):
            mapped = rename(node.value, name_map)
            if mapped != node.value:
                swaps[id(node)] = node.with_changes(value=mapped)
        elif isinstance(node, cst.Annotation) and isinstance(node.annotation, cst.SimpleString):
            text = node.annotation
            swaps[id(text)] = text.with_changes(value=rename(text.value, name_map))
    return replace_nodes(root, swaps)


def _calls(statement: cst.CSTNode, function: str) -> bool:
    """Whether a statement is a lone call of `function` or `self.function`."""
    if not isinstance(statement, cst.SimpleStatementLine) or not isinstance(statement.body[0], cst.Expr):
        return False
    call = statement.body[0].value
    if not isinstance(call, cst.Call):
        return False
    name = call.func.attr if isinstance(call.func, cst.Attribute) else call.func
    return isinstance(name, cst.Name) and name.value == function


def apply_undecorated_copy(edit: UndecoratedCopy, edited: EditedModule) -> None:
    function = edited.get(edit.target, edit)
    assert isinstance(function, cst.FunctionDef)
    lines = [cst.EmptyLine(indent=False)] * 2
    copy = function.deep_clone().with_changes(name=cst.Name(edit.name), decorators=(), leading_lines=lines)
    edited.sign(edit, [copy])
    index = edited.index(edit.target)
    assert index is not None
    edited.module = splice(edited.module, index + 1, index + 1, [copy], edited.mark(edit))
