"""Surgery on LibCST trees that leaves every untouched node as it is, by identity."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import libcst as cst

Node = TypeVar("Node", bound=cst.CSTNode)

Block = TypeVar("Block", cst.IndentedBlock, cst.Module)

Replacements = Mapping[int, cst.CSTNode | Sequence[cst.CSTNode]]
"""New nodes by the `id` of the node that each replaces; several replace one in a sequence."""

_NEEDS_PARENTHESES = (
    cst.BinaryOperation,
    cst.BooleanOperation,
    cst.Comparison,
    cst.IfExp,
    cst.Lambda,
    cst.UnaryOperation,
    cst.NamedExpr,
    cst.Await,
    cst.Yield,
    cst.GeneratorExp,
)

_SELF_DELIMITED = (
    cst.Arg,
    cst.Assign,
    cst.AnnAssign,
    cst.AugAssign,
    cst.Return,
    cst.Index,
    cst.Element,
    cst.DictElement,
    cst.Expr,
)


# Fields that hold punctuation; those with whitespace have it in their names.
_LAYOUT = {
    "lpar",
    "rpar",
    "lbracket",
    "rbracket",
    "lbrace",
    "rbrace",
    "dot",
    "equal",
    "comma",
    "semicolon",
    "leading_lines",
    "lines_after_decorators",
    "header",
    "footer",
    "indent",
    "newline",
    "trailing_whitespace",
}
_fields: dict[type, tuple[str, ...] | None] = {}


def _fields_of(kind: type) -> tuple[str, ...] | None:
    """Fields of a class of nodes that hold code; None for another class.

    LibCST's classes are abstract, so isinstance is slow.
    """
    if kind not in _fields:
        names = [f.name for f in dataclasses.fields(kind)] if issubclass(kind, cst.CSTNode) else None
        _fields[kind] = None if names is None else tuple(n for n in names if n not in _LAYOUT and "whitespace" not in n)
    return _fields[kind]


def is_node(value: object) -> bool:
    return _fields_of(type(value)) is not None


def fields(node: cst.CSTNode) -> Iterator[tuple[str, Any]]:
    """Fields that hold code, not layout."""
    for name in _fields_of(type(node)) or ():
        yield name, getattr(node, name)


def children(node: cst.CSTNode) -> list[cst.CSTNode]:
    found: list[cst.CSTNode] = []
    for name in _fields_of(type(node)) or ():
        value = getattr(node, name)
        kind = type(value)
        if kind is tuple or kind is list:
            found += [item for item in value if _fields_of(type(item)) is not None]
        elif kind is not str and value is not None and _fields_of(kind) is not None:
            found.append(value)
    return found


def walk(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """The node and all nodes below it that are code, in the order of the source."""
    remaining = [node]
    while remaining:
        current = remaining.pop()
        yield current
        remaining.extend(reversed(children(current)))


# Fields that hold statements and what consists of them.
_STATEMENTS = ("cases", "finalbody", "orelse", "handlers", "body")


def walk_statements(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """What `walk` yields, without expressions, for a module, a block or a statement."""
    remaining = [node]
    while remaining:
        current = remaining.pop()
        yield current
        for name in _STATEMENTS:
            value = getattr(current, name, None)
            if isinstance(value, list | tuple):
                remaining.extend(reversed(value))
            elif value is not None:
                remaining.append(value)


@lru_cache(maxsize=4096)
def names_below(root: cst.CSTNode) -> frozenset[str]:
    """The identifiers in a statement, attributes and arguments included."""
    return frozenset(node.value for node in walk(root) if isinstance(node, cst.Name))


def replace_nodes(root: Node, replacements: Replacements) -> Node:
    """A tree in which each node whose `id` is a key gives way to its value: one node, or several in a sequence.

    Nodes without a change below them are the same objects as before.
    """

    if not replacements:
        return root

    def rebuilt(node: cst.CSTNode) -> cst.CSTNode:
        changes: dict[str, Any] = {}
        for name, value in fields(node):
            if is_node(value):
                new = replaced(value, node)
                assert isinstance(new, cst.CSTNode), "several nodes fit only into a sequence"
                if new is not value:
                    changes[name] = new
            elif isinstance(value, list | tuple) and any(map(is_node, value)):
                items: list[Any] = []
                for item in value:
                    new = replaced(item, node) if is_node(item) else item
                    items.extend(new if isinstance(new, list | tuple) else [new])
                if len(items) < len(value) and items and isinstance(items[-1], cst.Arg):
                    items[-1] = items[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
                if len(items) != len(value) or any(a is not b for a, b in zip(items, value)):
                    changes[name] = items
        return node.with_changes(**changes) if changes else node

    def replaced(node: cst.CSTNode, parent: cst.CSTNode) -> cst.CSTNode | Sequence[cst.CSTNode]:
        new = replacements.get(id(node))
        if new is None:
            return rebuilt(node)
        if isinstance(new, cst.BaseExpression) and not isinstance(parent, _SELF_DELIMITED):
            arm = isinstance(parent, cst.IfExp) and isinstance(new, cst.BinaryOperation)
            return new if arm else parenthesized(new)
        return new

    result = replaced(root, cst.Expr(cst.Name("_")))
    return result  # type: ignore[return-value]


def parenthesized(expression: cst.BaseExpression) -> cst.BaseExpression:
    """The expression in parentheses where its parts could otherwise bind to what is beside it."""
    if isinstance(expression, _NEEDS_PARENTHESES) and not expression.lpar:
        return expression.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
    return expression


def block_of(node: Node) -> Node:
    """The class, function or compound statement with its body as an indented block (not on the header's line)."""
    body = getattr(node, "body", None)
    if not isinstance(body, cst.SimpleStatementSuite):
        return node
    statements = [
        small.with_changes(semicolon=cst.MaybeSentinel.DEFAULT)
        for small in body.body
        if not (isinstance(small, cst.Expr) and isinstance(small.value, cst.Ellipsis))
    ]
    lines = [cst.SimpleStatementLine([small]) for small in statements]
    return node.with_changes(body=cst.IndentedBlock(body=lines or [cst.SimpleStatementLine([cst.Pass()])]))


def is_docstring(statement: cst.CSTNode) -> bool:
    return (
        isinstance(statement, cst.SimpleStatementLine)
        and len(statement.body) == 1
        and isinstance(statement.body[0], cst.Expr)
        and isinstance(statement.body[0].value, cst.SimpleString | cst.ConcatenatedString)
    )


def is_placeholder(statement: cst.CSTNode) -> bool:
    """Whether a statement is a lone `pass` or `...`."""
    if not isinstance(statement, cst.SimpleStatementLine) or len(statement.body) != 1:
        return False
    small = statement.body[0]
    return isinstance(small, cst.Pass) or (isinstance(small, cst.Expr) and isinstance(small.value, cst.Ellipsis))


def comment(text: str) -> cst.EmptyLine:
    return cst.EmptyLine(comment=cst.Comment(f"# {text}"))


def with_lines_above(statement: Node, lines: Sequence[cst.EmptyLine]) -> Node:
    """The statement with `lines` directly above it, under the blank lines and comments it already has."""
    return statement.with_changes(leading_lines=[*statement.leading_lines, *lines])  # type: ignore[attr-defined]


def splice(block: Block, start: int, stop: int, new: Sequence[cst.CSTNode], mark: str) -> Block:
    """The block with `body[start:stop]` replaced by `new`, which is bracketed by comment lines saying `mark`.

    Comments and blank lines above the replaced statements stay above the mark.
    """
    body: list[Any] = list(block.body)
    first, *others = new
    lines: list[cst.EmptyLine] = list(getattr(first, "leading_lines", ()))
    if start < stop:
        above: list[cst.EmptyLine] = list(body[start].leading_lines)
        lines = [line for line in lines if all(line is not kept for kept in above)]
    else:
        above = list(itertools.takewhile(lambda line: line.comment is None, lines))
        lines = lines[len(above) :]
    line = comment(mark)
    first = first.with_changes(leading_lines=[*above, line, *lines])
    changes: dict[str, Any] = {}
    if stop < len(body):
        body[stop] = body[stop].with_changes(leading_lines=[line, *body[stop].leading_lines])
    else:
        changes["footer"] = [line, *block.footer]
    body[start:stop] = [first, *others]
    return block.with_changes(body=body, **changes)
