"""Definitions of a module that LibCST parses when an edit needs them; most never are."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import libcst as cst

from opslot.patchgen.source import Definition, UpstreamModule

_NAME = "_opslot_unparsed_"


@dataclass(frozen=True)
class Unparsed(cst.BaseCompoundStatement):
    """The text of a function or class at the top level of a module.

    Attributes:
        name: of the function or class.
        text: its lines, without those of `leading_lines`.
        leading_lines: blank lines and comments above it.
    """

    name: str
    text: str
    leading_lines: Sequence[cst.EmptyLine] = ()

    def mentions(self, word: str) -> bool:
        """Whether the text has a word, which may also be part of a comment or a string."""
        return re.search(rf"\b{re.escape(word)}\b", self.text) is not None

    def parsed(self) -> cst.FunctionDef | cst.ClassDef:
        (definition,) = cst.parse_module(self.text).body
        assert isinstance(definition, cst.FunctionDef | cst.ClassDef)
        return definition.with_changes(leading_lines=self.leading_lines)

    def _visit_and_replace_children(self, visitor: cst.CSTVisitorT) -> Unparsed:
        return self

    def _codegen_impl(self, state: object) -> None:
        for line in self.leading_lines:
            line._codegen(state)  # type: ignore[arg-type]
        state.add_token(self.text)  # type: ignore[attr-defined]


def parse_around_definitions(upstream: UpstreamModule) -> cst.Module:
    """The module, with each function and class at its top level as an `Unparsed`."""
    lines = upstream.text.splitlines(keepends=True)
    found: dict[str, Unparsed] = {}
    around: list[str] = []
    end = 0
    for node in upstream.tree.body:
        if isinstance(node, Definition):
            start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]) - 1
            around += lines[end:start]
            end = _end_with_comments(lines, node.end_lineno or 0)
            place = f"{_NAME}{len(found)}"
            found[place] = Unparsed(node.name, "".join(lines[start:end]))
            around.append(f"{place}\n")
    module = cst.parse_module("".join([*around, *lines[end:]]))
    return module.with_changes(body=[_at_its_place(statement, found) for statement in module.body])


def _end_with_comments(lines: Sequence[str], end: int) -> int:
    """The number of lines up to the end of a definition with the indented comments below it."""
    for number in range(end, len(lines)):
        line = lines[number]
        if line.strip() and not re.match(r"[ \t]+#", line):
            break
        if line.strip():
            end = number + 1
    return end


def _at_its_place(
    statement: cst.SimpleStatementLine | cst.BaseCompoundStatement, found: dict[str, Unparsed]
) -> cst.SimpleStatementLine | cst.BaseCompoundStatement:
    small = statement.body[0] if isinstance(statement, cst.SimpleStatementLine) else None
    if isinstance(small, cst.Expr) and isinstance(small.value, cst.Name) and small.value.value in found:
        return found[small.value.value].with_changes(leading_lines=statement.leading_lines)
    return statement
