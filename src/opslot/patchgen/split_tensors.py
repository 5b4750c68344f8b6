"""Finds tensors that a method splits along their last dim and concatenates again, with one part changed between."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class SplitTensor:
    """`first, last = torch.split(tensor, [...], dim=-1)`, changes of `last`, and `torch.cat((first, last), dim=-1)`.

    Nothing else reads or assigns `first` and `last`, and nothing reads or assigns `tensor` before the last change.

    Attributes:
        tensor, first, last: names.
        between: the statements that change `last`, of which at most one runs.
        concatenation: the call.
    """

    tensor: str
    first: str
    last: str
    between: tuple[ast.Assign, ...]
    concatenation: ast.Call


# Branches of `if`: the statement, and whether it is the one where the test holds.
Branches = tuple[tuple[ast.If, bool], ...]


def split_and_concatenated(definition: ast.FunctionDef) -> Iterator[SplitTensor]:
    """The tensors of a method, in the order of its text."""
    placed = list(statements_run_once(definition.body))
    names = [node for node in ast.walk(definition) if isinstance(node, ast.Name)]
    for statement, branches in placed:
        parts = _split(statement)
        if parts is None or branches:
            continue
        tensor, first, last = parts
        call = _concatenation(definition.body, first, last)
        between = [at for at in placed if at[0] is not statement and _assigns(at[0], last)]
        if call is None or not _exclude_each_other([branches for _, branches in between]):
            continue
        changes = tuple(at for at, _ in between if isinstance(at, ast.Assign))
        lines = [change.lineno for change in changes]
        changed = {id(node) for change in changes for node in ast.walk(change)}
        others = [node for node in names if id(node) not in changed]
        # Whether each use of the parts outside of the changes, in any order, is an assignment.
        uses = [sorted(isinstance(node.ctx, ast.Store) for node in others if node.id == part) for part in (first, last)]
        end = max(lines, default=statement.lineno)
        inside = [node for node in names if node.id == tensor and (statement.end_lineno or 0) < node.lineno <= end]
        if (
            all(statement.lineno < line < call.lineno for line in lines)
            and uses == [[False, True], [False, True]]
            and not inside
        ):
            yield SplitTensor(tensor, first, last, changes, call)


def statements_run_once(body: list[ast.stmt], branches: Branches = ()) -> Iterator[tuple[ast.stmt, Branches]]:
    """Statements that run at most once, and the branches that each is in."""
    for statement in body:
        yield statement, branches
        if isinstance(statement, ast.If):
            yield from statements_run_once(statement.body, (*branches, (statement, True)))
            yield from statements_run_once(statement.orelse, (*branches, (statement, False)))


def _split(statement: ast.stmt) -> tuple[str, str, str] | None:
    """Names of the tensor and of its two parts."""
    match statement:
        case ast.Assign(
            targets=[ast.Tuple(elts=[ast.Name(id=first), ast.Name(id=last)])],
            value=ast.Call(
                func=ast.Attribute(value=ast.Name(id="torch"), attr="split"),
                args=[ast.Name(id=tensor), ast.List(elts=[_, _])],
                keywords=[ast.keyword(arg="dim") as dim],
            ),
        ) if ast.unparse(dim) == "dim=-1" and tensor not in (first, last):
            return tensor, first, last
    return None


def _concatenation(body: list[ast.stmt], first: str, last: str) -> ast.Call | None:
    """The call that concatenates both in a statement outside of branches."""
    for statement in body:
        for node in ast.walk(statement) if isinstance(statement, ast.Assign) else ():
            if isinstance(node, ast.Call) and ast.unparse(node) in (
                f"torch.cat(({first}, {last}), dim=-1)",
                f"torch.cat([{first}, {last}], dim=-1)",
            ):
                return node
    return None


def _assigns(statement: ast.stmt, name: str) -> bool:
    return isinstance(statement, ast.Assign) and any(
        isinstance(node, ast.Name) and node.id == name for target in statement.targets for node in ast.walk(target)
    )


def _exclude_each_other(places: list[Branches]) -> bool:
    """Whether at most one of several statements in branches runs."""
    return all(
        any(one is other and then is not otherwise for one, then in a for other, otherwise in b)
        for i, a in enumerate(places)
        for b in places[:i]
    )
