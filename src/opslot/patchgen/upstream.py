"""The text of one module, and its symbols."""

from __future__ import annotations

import ast
import difflib
import hashlib
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TypeVar

from opslot._base.errors import PatchError

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_Node = TypeVar("_Node", bound=ast.AST)


@dataclass(frozen=True)
class Symbol:
    """A definition's text, with decorators, and the number of its first line in the module."""

    name: str
    text: str
    first_line: int

    @property
    def digest(self) -> str:
        """Hash of the code alone: comments, docstring, blank lines and trailing spaces do not count."""
        return _short_hash("\n".join(text for _, text in self.code_lines))

    @cached_property
    def code_lines(self) -> list[tuple[int, str]]:
        """Line number in the module and code of each line that holds code."""
        return [(self.first_line + index, line) for index, line in _code_lines(self.text)]

    @cached_property
    def line_digests(self) -> list[str]:
        """A short hash of each line in `code_lines`, enough to tell which lines changed."""
        return [_short_hash(text)[:6] for _, text in self.code_lines]


@dataclass(frozen=True)
class UpstreamModule:
    """The text of one upstream module.

    Attributes:
        name: its dotted name.
        version: of Transformers.
        text: its source. Of a module outside Transformers, the definitions that it imports follow.
        package: what relative imports start from.
        own: of a module outside Transformers, the functions and classes that are its own; None for Transformers',
            whose definitions all are.
        parts: the other modules outside Transformers that `text` has definitions of.
    """

    name: str
    version: str
    text: str
    package: str = ""
    own: frozenset[str] | None = None
    parts: tuple[str, ...] = ()

    def is_own(self, symbol: str) -> bool:
        """Whether a function, class or method is the module's own, not imported."""
        return self.own is None or symbol.partition(".")[0] in self.own

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def _lines(self) -> list[str]:
        return self.text.splitlines(keepends=True)

    @cached_property
    def definitions(self) -> dict[str, Definition]:
        """Classes, their methods as `Class.method`, and functions, by name; the last one wins, as it does in Python."""
        found: dict[str, Definition] = {}
        for statement in self.tree.body:
            if isinstance(statement, Definition):
                found[statement.name] = statement
                inside = statement.body if isinstance(statement, ast.ClassDef) else []
                found |= {f"{statement.name}.{child.name}": child for child in inside if isinstance(child, Definition)}
        return found

    def find(self, name: str) -> Definition | None:
        """The definition called `name`."""
        return self.definitions.get(name)

    def symbol(self, name: str) -> Symbol | None:
        """The text of a definition; None if the module has no such definition."""
        definition = self.find(name)
        if definition is None:
            return None
        first = min([definition.lineno, *(decorator.lineno for decorator in definition.decorator_list)])
        text = "".join(self._lines[first - 1 : definition.end_lineno])
        return Symbol(name, text, first)

    def require(self, name: str) -> Symbol:
        """Like `symbol`, but raises PatchError with similar names if it is missing."""
        found = self.symbol(name)
        if found is None:
            raise PatchError(
                f"{self.name} of transformers {self.version}: {self.missing(name)}", hint="name one that it has"
            )
        return found

    def missing(self, name: str) -> str:
        """The message for a symbol that the module does not have, with the nearest names."""
        close = difflib.get_close_matches(name, self.definitions, n=5, cutoff=0.4)
        hint = f"; similar names: {', '.join(close)}" if close else ""
        return f"it has no {name}{hint}"


@lru_cache(maxsize=2048)
def nodes_below(root: ast.AST) -> tuple[ast.AST, ...]:
    """The nodes that `ast.walk` yields, without contexts such as ast.Load; for trees that do not change."""
    nodes = [root]
    for node in nodes:
        for name in node._fields:
            value = getattr(node, name, None)
            if type(value) is list:
                nodes += [item for item in value if isinstance(item, ast.AST)]
            elif isinstance(value, ast.AST) and name != "ctx":
                nodes.append(value)
    return tuple(nodes)


def find_nodes(kind: type[_Node], *roots: ast.AST | None) -> Iterator[_Node]:
    """The nodes of a kind among those of `nodes_below`; none below a root of None."""
    return (node for root in roots if root is not None for node in nodes_below(root) if isinstance(node, kind))


def _code_lines(text: str) -> list[tuple[int, str]]:
    """Index and text of each line with code, docstrings and comments removed."""
    lines = text.splitlines()
    indent = re.match(r"\s*", text).group()  # type: ignore[union-attr]
    dedented = "\n".join(line.removeprefix(indent) for line in lines) + "\n"
    docstring_lines: set[int] = set()
    for node in ast.walk(ast.parse(dedented)):
        if isinstance(node, Definition) and ast.get_docstring(node, clean=False) is not None:
            expression = node.body[0]
            docstring_lines.update(range(expression.lineno, (expression.end_lineno or 0) + 1))
    kept = dedented.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(dedented).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            kept[row - 1] = kept[row - 1][:column]
    return [
        (index, line.rstrip()) for index, line in enumerate(kept) if line.strip() and index + 1 not in docstring_lines
    ]


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
