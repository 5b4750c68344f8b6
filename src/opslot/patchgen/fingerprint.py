"""Hashes of what a function computes, whatever its names, comments, annotations and decorators."""

from __future__ import annotations

import ast
import hashlib
import textwrap
from collections.abc import Iterator
from functools import lru_cache


@lru_cache(maxsize=2048)
def fingerprint(source: str) -> str:
    """Fingerprint of a function or method, given its source text.

    Two functions have one fingerprint when their code is equal up to the names of parameters and local variables.
    Defaults, attributes, called functions and constants count; docstring, annotations, decorators and the
    function's own name do not.
    """
    (function,) = ast.parse(textwrap.dedent(source)).body
    assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef), "only functions have fingerprints"
    function.decorator_list = []
    function.returns = None
    function.name = "f"
    if ast.get_docstring(function) is not None:
        function.body = function.body[1:] or [ast.Pass()]
    _normalise(function, _local_names(function))
    return hashlib.sha256(ast.unparse(function).encode()).hexdigest()[:12]


def _local_names(function: ast.FunctionDef | ast.AsyncFunctionDef) -> dict[str, str]:
    """A canonical name for each parameter and local variable, by order of appearance; `self` keeps its name."""
    names: dict[str, str] = {}
    for node in _in_order(function):
        name = None
        if isinstance(node, ast.arg):
            name = node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        if name is not None and name != "self" and name not in names:
            names[name] = f"v{len(names)}"
    return names


def _in_order(node: ast.AST) -> Iterator[ast.AST]:
    remaining = [node]
    while remaining:
        current = remaining.pop()
        yield current
        remaining.extend(reversed(list(ast.iter_child_nodes(current))))


def _normalise(root: ast.AST, names: dict[str, str]) -> None:
    """Give parameters and variables the names in `names`, and drop annotations."""
    for node in ast.walk(root):
        if isinstance(node, ast.Name):
            node.id = names.get(node.id, node.id)
        elif isinstance(node, ast.arg):
            node.arg, node.annotation = names.get(node.arg, node.arg), None
        for field in ("body", "orelse", "finalbody"):
            statements = getattr(node, field, None)
            if isinstance(statements, list):
                statements[:] = map(_without_annotation, statements)


def _without_annotation(statement: ast.stmt) -> ast.stmt:
    if not isinstance(statement, ast.AnnAssign):
        return statement
    if statement.value is None:
        return ast.Pass()
    return ast.copy_location(ast.Assign(targets=[statement.target], value=statement.value), statement)
