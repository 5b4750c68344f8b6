"""Hashes of what a function computes, whatever its names, comments, annotations and decorators."""

from __future__ import annotations

import ast
import hashlib
import textwrap


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
    normalised = ast.fix_missing_locations(_Normaliser(_local_names(function)).visit(function))
    return hashlib.sha256(ast.unparse(normalised).encode()).hexdigest()[:12]


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


def _in_order(node: ast.AST) -> list[ast.AST]:
    nodes = [node]
    for child in ast.iter_child_nodes(node):
        nodes.extend(_in_order(child))
    return nodes


class _Normaliser(ast.NodeTransformer):
    def __init__(self, names: dict[str, str]) -> None:
        self.names = names

    def visit_arg(self, node: ast.arg) -> ast.arg:
        return ast.arg(arg=self.names.get(node.arg, node.arg))

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.Name(id=self.names.get(node.id, node.id), ctx=node.ctx)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.stmt:
        if node.value is None:
            return ast.Pass()
        return ast.Assign(targets=[self.visit(node.target)], value=self.visit(node.value))
