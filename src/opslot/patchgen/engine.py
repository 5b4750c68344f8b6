"""Applies a patch to a release's module and renders the result."""

from __future__ import annotations

from dataclasses import dataclass
from functools import singledispatch

import libcst as cst

from opslot._base.errors import PatchError
from opslot.patchgen import exclusion
from opslot.patchgen.config import PatchConfig
from opslot.patchgen.document import Document
from opslot.patchgen.edits import (
    Anchored,
    Edit,
    Exclude,
    ExternalReplacement,
    InheritMethod,
    ModifyInit,
    Replacement,
    SlotCalls,
    SlotMethod,
)
from opslot.patchgen.fingerprint import fingerprint
from opslot.patchgen.inheritance import apply_inherit_method
from opslot.patchgen.module_edits import finish_module
from opslot.patchgen.pattern import Match, compile_pattern, fill_expression, fill_statements, find_matches
from opslot.patchgen.replacements import apply_external, apply_modify_init, apply_replacement
from opslot.patchgen.source import Release, Symbol
from opslot.patchgen.tree import is_docstring, replace_nodes, splice


@dataclass(frozen=True)
class GeneratedModule:
    """A generated module's text, upstream's text that it was made from, and the symbols that it relies on."""

    text: str
    upstream_text: str
    symbols: dict[str, Symbol | None]


def generate(patch: PatchConfig, release: Release) -> GeneratedModule:
    """Apply `patch` to the module of `release`. The same patch and release give the same bytes.

    Raises:
        PatchError: a symbol or anchor is missing, matches another number of times, has another body than the
            patch expects, or two edits claim one place.
    """
    document, problems = apply_all(patch, release)
    if problems:
        raise problems[0]
    document.write_slot_declarations()
    finish_module(document)
    return GeneratedModule(document.module.code, document.upstream.text, watched_symbols(document))


def apply_all(patch: PatchConfig, release: Release) -> tuple[Document, list[PatchError]]:
    """Apply every edit that can be, and collect what stands against the others."""
    check_conflicts(patch)
    document = Document(patch, release)
    problems = []
    for edit in patch.edits:
        try:
            apply(edit, document)
        except PatchError as problem:
            problems.append(problem)
    return document, problems


def watched_symbols(document: Document) -> dict[str, Symbol | None]:
    """Upstream's text of each symbol that the patch touches or depends on, as `module:symbol`; None where absent."""
    patch = document.patch
    inherited = {edit.target for edit in patch.edits if isinstance(edit, InheritMethod)}
    names = {name for edit in patch.edits for name in edit.symbols}
    names |= {*document.touched, *patch.dependencies}
    watched: dict[str, Symbol | None] = {}
    for name in names - inherited:
        if "." not in name.rpartition(":")[2] or name.rpartition(".")[0] not in names:
            module, _, symbol = name.rpartition(":")
            module = module or patch.source_module
            watched[f"{module}:{symbol}"] = document.release.module(module).symbol(symbol)
    return dict(sorted(watched.items()))


def check_conflicts(patch: PatchConfig) -> None:
    """Raise when an edit that replaces a symbol meets another edit of that symbol, or of one inside it."""
    for index, first in enumerate(patch.edits):
        for second in patch.edits[index + 1 :]:
            if isinstance(first, SlotCalls) or isinstance(second, SlotCalls):
                continue
            same = first.target == second.target
            inside = (first.replaces_whole and second.target.startswith(f"{first.target}.")) or (
                second.replaces_whole and first.target.startswith(f"{second.target}.")
            )
            whole = first.replaces_whole or second.replaces_whole
            both_in_front = isinstance(first, SlotMethod) and isinstance(second, SlotMethod)
            if inside or (same and (whole or both_in_front)):
                raise PatchError(
                    f"two patches of {patch.source_module} claim one place: `{first.summary}` ({first.target})"
                    f" and `{second.summary}` ({second.target}); drop one of them"
                )


@singledispatch
def apply(edit: Edit, document: Document) -> None:
    """Apply one edit to the document."""
    raise TypeError(f"no way to apply {type(edit).__name__}")


apply.register(InheritMethod)(apply_inherit_method)
apply.register(Replacement)(apply_replacement)
apply.register(ExternalReplacement)(apply_external)
apply.register(ModifyInit)(apply_modify_init)
apply.register(Exclude)(exclusion.apply_exclude)


@apply.register
def _(edit: SlotMethod, document: Document) -> None:
    method = document.get(edit.target, edit)
    assert isinstance(method, cst.FunctionDef)
    class_name, _, method_name = edit.target.partition(".")
    expect_fingerprint(document, edit, edit.target, edit.expects)
    document.declare(class_name, edit.slot, edit)
    if edit.outside_decorators:
        _slot_outside_decorators(edit, document, method)
        return
    call = f"if self.{edit.slot.attribute} is not None:\n    return self.{edit.slot.attribute}({edit.args})\n"
    new = cst.parse_module(call).body
    document.sign(edit, new)
    block = method.body
    assert isinstance(block, cst.IndentedBlock)
    start = 1 if is_docstring(block.body[0]) else 0
    document.put(edit.target, method.with_changes(body=splice(block, start, start, new, document.mark(edit))))
    document.note(edit.target, f"slot {edit.slot} in front of {method_name}")


def _slot_outside_decorators(edit: SlotMethod, document: Document, method: cst.FunctionDef) -> None:
    """After the class, put a function around whatever the decorators left as the method."""
    class_name, _, method_name = edit.target.partition(".")
    names = [parameter.name.value for parameter in method.params.params[1:]]
    text = (
        f"_opslot_dispatch_{class_name} = {class_name}.{method_name}\n\n\n"
        f"def _opslot_{method_name}_{class_name}({', '.join(['self', *names])}):\n"
        f"    if self.{edit.slot.attribute} is not None:\n"
        f"        return self.{edit.slot.attribute}({edit.args})\n"
        f"    return _opslot_dispatch_{class_name}({', '.join(['self', *names])})\n\n\n"
        f"{class_name}.{method_name} = _opslot_{method_name}_{class_name}\n"
    )
    first, *others = cst.parse_module(text).body
    new = [first.with_changes(leading_lines=[cst.EmptyLine(indent=False)] * 2), *others]
    document.sign(edit, new)
    index = document.index(class_name)
    assert index is not None
    document.module = splice(document.module, index + 1, index + 1, new, document.mark(edit))
    document.note(class_name, f"slot {edit.slot} outside the decorators of {method_name}, below the class")


@apply.register
def _(edit: SlotCalls, document: Document) -> None:
    document.get(edit.target, edit)
    for symbol, allowed in edit.expects:
        expect_fingerprint(document, edit, symbol, allowed)
    routed = cst.parse_expression(f"(self.{edit.slot.attribute} or {edit.target})")
    total = 0
    for class_name, method_name in _methods(document.module):
        symbol = f"{class_name}.{method_name}"
        method = document.get(symbol, edit)
        assert isinstance(method, cst.FunctionDef)
        found = [
            match
            for match in find_matches(compile_pattern(f"{edit.target}($*arguments)"), method.body)
            if match.expression is not None
        ]
        if not found:
            continue
        total += len(found)
        document.declare(class_name, edit.slot, edit)
        swaps: dict[int, list[cst.CSTNode]] = {}
        for match in found:
            assert isinstance(match.expression, cst.Call)
            new = match.expression.with_changes(func=routed.deep_clone())
            document.sign(edit, [new], list(match.expression.args))
            swaps[id(match)] = [new]
        document.put(symbol, rewrite(method, found, swaps, document.mark(edit)))
        document.note(symbol, f"slot {edit.slot} on the call of {edit.target}")
    if total == 0 or (edit.count is not None and total != edit.count):
        expected = "at least one" if edit.count is None else edit.count
        raise document.fail(edit, f"{expected} call(s) of {edit.target} in methods expected, {total} found")


def _methods(module: cst.Module) -> list[tuple[str, str]]:
    return [
        (node.name.value, child.name.value)
        for node in module.body
        if isinstance(node, cst.ClassDef)
        for child in node.body.body
        if isinstance(child, cst.FunctionDef)
    ]


@apply.register
def _(edit: Anchored, document: Document) -> None:
    scope = document.get(edit.target, edit)
    matches: list[Match] = []
    for text in edit.patterns:
        matches.extend(find_matches(compile_pattern(text), scope.body))
    if len(matches) != edit.count:
        anchors = "\n  or\n".join(edit.patterns)
        raise document.fail(
            edit, f"{edit.count} match(es) expected, {len(matches)} found, of\n{anchors}", show=edit.target
        )
    swaps: dict[int, list[cst.CSTNode]] = {}
    for match in matches:
        earlier = document.author(match.nodes)
        if earlier is not None and edit.mode == "replace":
            raise document.fail(edit, f"its place was already changed by `{earlier.summary}`; drop one of the two")
        swaps[id(match)] = _written(edit, document, match)
    document.put(edit.target, rewrite(scope, matches, swaps, document.mark(edit), edit.mode))
    document.note(edit.target, edit.summary)
    if edit.slot is not None:
        document.declare(edit.target.split(".")[0], edit.slot, edit)


def _written(edit: Anchored, document: Document, match: Match) -> list[cst.CSTNode]:
    """What the edit puts at a match."""
    new: list[cst.CSTNode]
    if edit.mode == "replace" and match.expression is not None:
        try:
            new = [fill_expression(edit.template, match.captures, match.expression)]
        except cst.ParserSyntaxError:
            raise document.fail(edit, f"an expression cannot be replaced by statements:\n{edit.template}") from None
    else:
        # What stands above the first statement is put above the edit's mark by `splice`.
        first, *others = match.nodes
        upstream = [first.with_changes(leading_lines=[]) if match.expression is None else first, *others]
        new = fill_statements(edit.template, match.captures, upstream)
        document.sign(edit, new, upstream)
        return new
    document.sign(edit, new, match.nodes)
    return new


def rewrite(
    scope: cst.FunctionDef | cst.ClassDef,
    matches: list[Match],
    swaps: dict[int, list[cst.CSTNode]],
    mark: str,
    mode: str = "replace",
) -> cst.CSTNode:
    """The scope with `swaps[id(match)]` put at each match, the touched statements bracketed by `mark`."""
    root: cst.CSTNode = scope
    blocks = {id(match.block): match.block for match in matches}
    for block in blocks.values():
        inside = [match for match in matches if match.block is block]
        new_block = block
        for start in sorted({match.start for match in inside}, reverse=True):
            here = [match for match in inside if match.start == start]
            new_block = _rewrite_statements(new_block, here, swaps, mark, mode)
        root = replace_nodes(root, {id(block): new_block})
    return root


def _rewrite_statements(
    block: cst.IndentedBlock, here: list[Match], swaps: dict[int, list[cst.CSTNode]], mark: str, mode: str
) -> cst.IndentedBlock:
    start, stop = here[0].start, here[0].stop
    if mode == "insert_before":
        return splice(block, start, start, swaps[id(here[0])], mark)
    if mode == "insert_after":
        return splice(block, stop, stop, swaps[id(here[0])], mark)
    if here[0].expression is None:
        return splice(block, start, stop, swaps[id(here[0])], mark)
    expressions = {id(match.expression): swaps[id(match)][0] for match in here}
    return splice(block, start, stop, [replace_nodes(block.body[start], expressions)], mark)


def expect_fingerprint(document: Document, edit: Edit, symbol: str, allowed: tuple[str, ...]) -> None:
    """Raise unless upstream's `symbol` is one of the bodies that the slot may stand for."""
    if not allowed:
        return
    found = fingerprint(document.upstream.require(symbol).text)
    if found not in allowed:
        raise document.fail(
            edit,
            f"{symbol} computes something else than the patch was written for: fingerprint {found}, expected"
            f" {' or '.join(allowed)}; if the slot's op still means the same, add the new fingerprint",
            show=symbol,
        )
