"""Finds two tensors that a method normalizes, each with a module, before or after it passes both to a function."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from opslot.patchgen.split_tensors import Branches, statements_run_once


@dataclass(frozen=True)
class NormedHeads:
    """`q, k = function(q, k, ...)`, and `q = self.<norm>(x)` and `k = self.<norm>(y)` before it or, of q and k, after.

    In between, q and k are at most transposed, and nothing else reads them.

    Attributes:
        call: the statement that calls the function.
        norms: the calls of the two norms, of q and of k.
        is_last: the norms come after the function.
        conditions: under which all three calls run, which hold or not from the beginning of the method.
        before: the statement of the method's body before that with the first of the three.
    """

    call: ast.Assign
    norms: tuple[ast.Call, ast.Call]
    is_last: bool
    conditions: tuple[str, ...]
    before: ast.stmt


def normed_heads(definition: ast.FunctionDef, function: str) -> Iterator[NormedHeads]:
    """Those of each call of `function`, in the order of the method's text."""
    placed = list(statements_run_once(definition.body))
    for statement, branches in placed:
        names = _passed_through(statement, function)
        if names is None:
            continue
        assert isinstance(statement, ast.Assign)
        for is_last in (False, True):
            found = [_norm(definition, placed, statement, name, is_last) for name in names]
            if None in found:
                continue
            norms = [each for each in found if each is not None]
            tests = _conditions(definition, [branches, *(inside for _, _, inside in norms)])
            if tests is None:
                continue
            first = min(statement.lineno, *(norm.lineno for norm, _, _ in norms))
            before = [outer for outer in definition.body if (outer.end_lineno or 0) < first]
            if before:
                (_, q_norm, _), (_, k_norm, _) = norms
                yield NormedHeads(statement, (q_norm, k_norm), is_last, tests, before[-1])


def _passed_through(statement: ast.stmt, function: str) -> tuple[str, str] | None:
    """The names in `q, k = function(q, k, ...)`."""
    match statement:
        case ast.Assign(
            targets=[ast.Tuple(elts=[ast.Name(id=q_out), ast.Name(id=k_out)])],
            value=ast.Call(func=ast.Name(id=called), args=[ast.Name(id=q), ast.Name(id=k), *_]),
        ) if called == function and (q_out, k_out) == (q, k) and q != k:
            return q, k
    return None


def _norm(
    definition: ast.FunctionDef,
    placed: list[tuple[ast.stmt, Branches]],
    call: ast.Assign,
    name: str,
    is_last: bool,
) -> tuple[ast.Assign, ast.Call, Branches] | None:
    """The assignment of the normalized tensor, the norm's call in it, and the branches that it is in; None for none."""
    assignments = [
        (statement, branches)
        for statement, branches in placed
        if isinstance(statement, ast.Assign) and _targets(statement) == [name]
    ]
    others = [
        (statement, branches)
        for statement, branches in (assignments if is_last else reversed(assignments))
        if (statement.lineno > call.lineno) == is_last
    ]
    transposes: list[ast.Assign] = []
    for statement, branches in others:
        if ast.unparse(statement.value) == f"{name}.transpose(1, 2)":
            transposes.append(statement)
            continue
        norm = _norm_of(statement.value, name if is_last else None)
        if norm is None:
            return None
        first, last = (call, statement) if is_last else (statement, call)
        known = {id(node) for each in (call, statement, *transposes) for node in ast.walk(each)}
        between = [
            node
            for node in ast.walk(definition)
            if isinstance(node, ast.Name) and node.id == name and first.lineno <= node.lineno <= (last.end_lineno or 0)
        ]
        return (statement, norm, branches) if all(id(node) in known for node in between) else None
    return None


def _targets(statement: ast.Assign) -> list[str]:
    return [ast.unparse(target) for target in statement.targets]


def _norm_of(value: ast.expr, argument: str | None) -> ast.Call | None:
    """The call in `self.<norm>(x)` or `self.<norm>(x).transpose(1, 2)`; x is `argument` if that is given."""
    match value:
        case ast.Call(
            func=ast.Attribute(value=inner, attr="transpose"),
            args=[ast.Constant(value=1), ast.Constant(value=2)],
            keywords=[],
        ):
            value = inner
    match value:
        case ast.Call(func=ast.Attribute(value=ast.Name(id="self")), args=[x], keywords=[]) if not isinstance(
            x, ast.Starred
        ) and argument in (None, ast.unparse(x)):
            return value
    return None


def _conditions(definition: ast.FunctionDef, places: list[Branches]) -> tuple[str, ...] | None:
    """The tests of the branches that statements are in, as source text; None if one may change in the method.

    They read parameters and attributes of self that the method does not assign, and call nothing.
    """
    found: dict[str, None] = {}
    assigned = {
        ast.unparse(node)
        for node in ast.walk(definition)
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store)
    }
    parameters = {argument.arg for argument in (*definition.args.args, *definition.args.kwonlyargs)}
    for test, then in ((branch.test, then) for branches in places for branch, then in branches):
        for node in ast.walk(test):
            if isinstance(node, ast.Call | ast.Subscript | ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom):
                return None
            if isinstance(node, ast.Name) and (node.id not in parameters or node.id in assigned):
                return None
            if isinstance(node, ast.Attribute) and ast.unparse(node) in assigned:
                return None
        text = f"({ast.unparse(test)})" if isinstance(test, ast.BoolOp | ast.IfExp) or not then else ast.unparse(test)
        found[text if then else f"not {text}"] = None
    return tuple(found)
