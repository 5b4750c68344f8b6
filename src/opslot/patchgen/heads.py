"""Finds the linear layer of an output head, also inside modules such as BERT's prediction head. Works on `ast`."""

from __future__ import annotations

import ast
import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeGuard

from opslot.patchgen.fused_loss import UnknownLossError
from opslot.patchgen.upstream import find_nodes

Classes = Mapping[str, ast.ClassDef]

LINEAR = ("nn.Linear", "torch.nn.Linear", "Linear")


@dataclass(frozen=True)
class OutputHead:
    """A linear layer that computes logits.

    Attributes:
        linear: the layer, as source text, e.g. "self.lm_head" or "self.cls.predictions.decoder".
        input: what it is called with.
        statements: what computes the input, in place of the forwards of `around`.
        around: the modules that contain the layer, as source text.
        without_bias: whether the layer is known to have no bias.
    """

    linear: str
    input: ast.expr
    statements: tuple[ast.stmt, ...] = ()
    around: tuple[str, ...] = ()
    without_bias: bool = False

    @property
    def served(self) -> str:
        """The modules that the kernel replaces, as arguments."""
        return ", ".join((self.linear, *self.around))


def find_head(head: str, head_input: ast.expr, init: ast.FunctionDef | None, classes: Classes) -> OutputHead:
    """The linear layer that a call of `head` with `head_input` ends with.

    Args:
        init: the constructor that makes `head`, if the class has its own.
        classes: those of the module, by name.

    Raises:
        UnknownLossError: the head is something else.
    """
    found = OutputHead(head, head_input)
    while True:
        calls = made(found.linear.rpartition(".")[2], init)
        other = sorted({ast.unparse(call.func) for call in calls} - {*LINEAR})
        if not other:
            biases = [k.value for call in calls for k in call.keywords if k.arg == "bias"]
            without = bool(calls) and len(biases) == len(calls) and all(ast.unparse(b) == "False" for b in biases)
            return OutputHead(found.linear, found.input, found.statements, found.around, without)
        if len(calls) > 1 or other[0] not in classes:
            raise UnknownLossError(f"has a head of the class {other[0]}, which is not an nn.Linear")
        cls = classes[other[0]]
        found, init = _opened(found, cls), _method(cls, "__init__")


def made(attribute: str, init: ast.FunctionDef | None) -> list[ast.Call]:
    """The calls whose results a constructor assigns to an attribute of self."""
    return [
        node.value
        for node in find_nodes(ast.Assign, init)
        if ast.unparse(node.targets[0]) == f"self.{attribute}" and isinstance(node.value, ast.Call)
    ]


def _method(cls: ast.ClassDef, name: str) -> ast.FunctionDef | None:
    return next((node for node in cls.body if isinstance(node, ast.FunctionDef) and node.name == name), None)


def _opened(head: OutputHead, cls: ast.ClassDef) -> OutputHead:
    """The last call in the forward of `cls`, with the statements before it.

    Raises:
        UnknownLossError: its forward does more than assign variables and return the result of a module.
    """
    unknown = UnknownLossError(f"has a head of the class {cls.name}, which does not end with an nn.Linear")
    forward = _method(cls, "forward")
    if forward is None or forward.args.vararg or forward.args.kwonlyargs:
        raise unknown
    _, parameter, *others = forward.args.args
    # Without the docstring.
    body = [s for s in forward.body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
    result = body.pop() if body else None
    if len(others) > len(forward.args.defaults) or not isinstance(result, ast.Return):
        raise unknown
    assigned = []
    for statement in body:
        if not (isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name)):
            raise unknown
        assigned.append((statement.targets[0].id, statement.value))
    value = result.value
    while isinstance(value, ast.Name) and assigned and assigned[-1][0] == value.id:
        _, value = assigned.pop()
    if not is_call_of_child(value):
        raise unknown
    inline = _Inline(head.linear, {parameter.arg, *(name for name, _ in assigned)})
    call = inline.visit(copy.deepcopy(value))
    lines = [assignment(inline.variable(parameter.arg), head.input)]
    lines += [assignment(inline.variable(name), inline.visit(copy.deepcopy(x))) for name, x in assigned]
    return OutputHead(ast.unparse(call.func), call.args[0], (*head.statements, *lines), (*head.around, head.linear))


def is_call_of_child(value: ast.expr | None) -> TypeGuard[ast.Call]:
    """Whether it is `self.child(x)`."""
    return (
        isinstance(value, ast.Call)
        and isinstance(value.func, ast.Attribute)
        and ast.unparse(value.func.value) == "self"
        and len(value.args) == 1
        and not value.keywords
    )


def assignment(name: str, value: ast.expr) -> ast.stmt:
    return ast.Assign([ast.Name(name)], value, lineno=0)


@dataclass
class _Inline(ast.NodeTransformer):
    """Rewrites expressions of the forward of the module `owner`, whose variables are `names`, for the model's."""

    owner: str
    names: set[str]

    def variable(self, name: str) -> str:
        return f"in_head_{name}"

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id == "self":
            return ast.parse(self.owner, mode="eval").body
        return ast.Name(self.variable(node.id)) if node.id in self.names else node
