"""Finds the statements of a forward from the output head to the loss, and writes what a fused loss computes instead.

The region begins where the head computes the logits and ends with `if labels is not None: ...`, which computes the
loss. In between the logits may be multiplied, divided, capped by tanh and cast to float32. In the loss, rows of the
logits may be selected before they meet their labels; the fused form selects the same rows of the hidden states.
Anything else keeps Transformers' implementation. This file works on `ast`, without LibCST.
"""

from __future__ import annotations

import ast
import copy
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeGuard

from opslot.patchgen.edits import Slot
from opslot.patchgen.fused_loss import (
    LOSS_CALL,
    FusedLoss,
    UnknownLossError,
    is_loss,
    method_of,
    selected,
    short_source,
    uses_names,
    without_casts,
)
from opslot.patchgen.heads import LINEAR, Classes, assignment, find_head, is_call_of_child, made
from opslot.patchgen.upstream import find_nodes

_OPERATORS = {ast.Mult: "mul", ast.Div: "div", ast.Add: "add"}
_TANH = ("torch.tanh", "nn.functional.tanh", "F.tanh", "torch.nn.functional.tanh")
_CRITERIA = ("CrossEntropyLoss", "nn.CrossEntropyLoss", "torch.nn.CrossEntropyLoss")


@dataclass(frozen=True)
class LossRegion:
    """Statements `start:stop` of a forward's body, and what computes the same loss without logits.

    Attributes:
        served: the modules that the fused form replaces, as source text: the head, and modules around it.
        guards: conditions under which the fused form does not hold.
        fused: statements in which `loss_kernel` computes the loss.
        original: the region's own statements, where they had to change; "" where they stay.
        loss_function: the name of the function of Transformers that `self.loss_function` has to be; None where the
            region does not call it.
    """

    start: int
    stop: int
    served: str
    guards: tuple[str, ...]
    fused: str
    original: str = ""
    loss_function: str | None = None


# Arguments about the loss. Some releases' vision-language models do not pass them on, so that micro batches and ranks
# with different numbers of labels would be averaged wrongly.
_PASSED_ON = ("num_items_in_batch", "shift_labels")


def loss_statements(region: LossRegion, slot: Slot) -> str:
    """What replaces a region, with `$match` for its own statements."""
    guards = "".join(f" and not ({guard})" for guard in region.guards)
    return (
        f"loss_kernel = self.{slot.attribute} if labels is not None{guards} else None\n"
        f"if loss_kernel is not None and loss_kernel.can_serve(self, {region.served}):\n"
        f"{textwrap.indent(region.fused, '    ')}\n"
        "else:\n"
        f"{textwrap.indent(region.original or '$match', '    ')}"
    )


def loss_region(
    forward: ast.FunctionDef, init: ast.FunctionDef | None = None, cls: str = "", classes: Classes | None = None
) -> LossRegion:
    """The region of a forward.

    Args:
        init: the constructor of its class, if it has its own.
        cls: the name of its class.
        classes: those of its module, by name.

    Raises:
        UnknownLossError: the loss has no fused form.
    """
    forward = copy.deepcopy(forward)
    passes_on = _pass_on_arguments(forward)
    own, forward.body = forward.body, [_as_block(statement) for statement in forward.body]
    criteria = _criteria(forward, init)
    end, block = _loss_block(forward, criteria)
    calls = [node for node in ast.walk(block) if isinstance(node, ast.Call) and is_loss(node, criteria)]
    if len(calls) != 1:
        raise UnknownLossError(f"computes {len(calls)} losses with its labels")
    logits = _logits_name(calls[0], block)
    conditions = _choose_head(forward, end, logits, init)
    start = _head_statement(forward.body, end, logits, init)
    called, called_with, shape, kept = _logit_changes(forward.body[start:end], logits)
    head = find_head(called, called_with, init, classes or {})
    for operand in shape.operands:
        if not _is_setting(ast.parse(operand, mode="eval").body, forward, init):
            raise UnknownLossError(f"changes the logits by `{operand}`, which may be a tensor")
    if shape.bias and not _is_row_buffer(shape.bias, init):
        raise UnknownLossError(f"adds `{shape.bias}` to the logits, which is not a buffer with one row")
    if shape.bias and not head.without_bias:
        raise UnknownLossError(f"adds `{shape.bias}` to the logits of a head with a bias")
    _check_later_uses(forward.body[end + 1 :], logits)

    original = "\n".join(map(ast.unparse, own[start : end + 1])) if passes_on else ""

    if uses_names(head.input, logits):
        kept_input = assignment("in_head", head.input)
        head = replace(head, input=ast.Name("in_head"), statements=(*head.statements, kept_input))
    in_place = cls.endswith("ForMaskedLM") or _labels_in_place(init)
    loss = FusedLoss(logits, head.linear, head.input, shape.bias, shape.arguments(), criteria, in_place)
    fused, guards = loss.write(block)
    guards = [*(test for index, test in conditions.items() if index >= start), *guards]
    kept = [line for line in kept if not _sets_none(line, fused)]
    nothing = ast.parse(f"{logits} = None").body
    text = "\n".join(ast.unparse(statement) for statement in [*head.statements, *kept, *nothing, *fused])
    function = None
    if ast.unparse(calls[0].func) == LOSS_CALL:
        function = "ForMaskedLMLoss" if in_place else "ForCausalLMLoss"
    return LossRegion(start, end + 1, head.served, tuple(guards), text, original, function)


def _pass_on_arguments(forward: ast.FunctionDef) -> bool:
    """Add `_PASSED_ON` to a call of `self.loss_function` without `**kwargs`; whether there is one."""
    rest = forward.args.kwarg
    if rest is None:
        return False
    changed = False
    for node in ast.walk(forward):
        if not isinstance(node, ast.Call) or ast.unparse(node.func) != "self.loss_function":
            continue
        given = {keyword.arg for keyword in node.keywords}
        if None not in given and {"logits", "labels"} <= given and not given & set(_PASSED_ON):
            passed_on = ast.parse(selected(rest.arg, _PASSED_ON), mode="eval").body
            node.keywords.append(ast.keyword(None, passed_on))
            changed = True
    return changed


def _as_block(statement: ast.stmt) -> ast.stmt:
    """`loss = None if labels is None else <loss>`, in either order, as the block that computes the loss."""
    match statement:
        case ast.Assign(value=ast.IfExp(test=test, body=with_labels, orelse=without)):
            if ast.unparse(test) == "labels is None":
                with_labels, without = without, with_labels
            elif ast.unparse(test) != "labels is not None":
                return statement
            if ast.unparse(without) == "None":
                assigned = ast.Assign(statement.targets, with_labels)
                block = ast.If(ast.parse("labels is not None", mode="eval").body, [assigned], [])
                return ast.fix_missing_locations(ast.copy_location(block, statement))
    return statement


def _loss_block(forward: ast.FunctionDef, criteria: dict[str, ast.Call]) -> tuple[int, ast.If]:
    """Index and statement of `if labels is not None:` with the loss in it."""
    found = [
        (index, statement)
        for index, statement in enumerate(forward.body)
        if isinstance(statement, ast.If)
        and ast.unparse(statement.test) == "labels is not None"
        and not statement.orelse
        and any(is_loss(node, criteria) for node in ast.walk(statement))
    ]
    if len(found) != 1:
        elsewhere = any(is_loss(node, criteria) for node in ast.walk(forward))
        places = "several places" if found else "another way than in `if labels is not None:`"
        raise UnknownLossError(f"computes its loss in {places if found or elsewhere else 'another module'}")
    return found[0]


def _criteria(*methods: ast.AST | None) -> dict[str, ast.Call]:
    """What is bound to a `CrossEntropyLoss(...)`, with the call."""
    return {
        ast.unparse(node.targets[0]): node.value
        for method in methods
        if method is not None
        for node in ast.walk(method)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and ast.unparse(node.value.func) in _CRITERIA
        and not node.value.args
    }


def _logits_name(call: ast.AST, block: ast.If) -> str:
    """The variable outside the block that holds the logits."""
    assert isinstance(call, ast.Call)
    inside = {
        node.targets[0].id: node.value
        for node in reversed(list(ast.walk(block)))
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    keyword = next((k.value for k in call.keywords if k.arg in ("logits", "input")), None)
    value = keyword or (call.args[0] if call.args else None)
    for _ in range(len(inside) + 1):
        name = _base_name(value)
        if name is None or name not in inside:
            break
        value = inside[name]
        if _base_name(value) == name:
            break
    if name is None:
        raise UnknownLossError(f"calls its loss as `{short_source(call)}`")
    return name


def _base_name(value: ast.AST | None) -> str | None:
    """The variable at the bottom of attributes, subscripts and method calls."""
    while isinstance(value, ast.Attribute | ast.Subscript | ast.Call):
        value = value.func if isinstance(value, ast.Call) else value.value
    return value.id if isinstance(value, ast.Name) else None


def _choose_head(forward: ast.FunctionDef, end: int, logits: str, init: ast.FunctionDef | None) -> dict[int, str]:
    """Put `logits = head(x)` in place of `if test: ... else: logits = head(x)`, the test reading the config.

    Returns the tests by the indices of their statements; where one holds, the logits are those of the other branch.
    """
    tests = {}
    for index, statement in enumerate(forward.body[:end]):
        match statement:
            case ast.If(test=ast.Compare(left=left, comparators=others) as test, orelse=[ast.Assign() as head]):
                settings = all(_is_setting(value, forward, init) for value in (left, *others))
                if settings and _is_assignment(head, logits) and not uses_names(head.value, logits):
                    forward.body[index] = head
                    tests[index] = ast.unparse(test)
    return tests


def _head_statement(body: Sequence[ast.stmt], end: int, logits: str, init: ast.FunctionDef | None) -> int:
    """Index of the assignment before `end` from which on `logits` exists."""
    for index in reversed(range(end)):
        statement = body[index]
        if _is_assignment(statement, logits) and not uses_names(statement.value, logits):
            return index
        if _is_assignment(statement, logits) and _is_linear(statement.value, init):
            return index
        if not _is_assignment(statement, logits) and isinstance(statement, ast.With | ast.For | ast.While | ast.Try):
            break
    raise UnknownLossError("takes its logits from somewhere else than a head of its own")


def _is_linear(value: ast.expr, init: ast.FunctionDef | None) -> bool:
    """Whether it calls an nn.Linear that the constructor makes."""
    calls = made(ast.unparse(value.func).removeprefix("self."), init) if is_call_of_child(value) else []
    return bool(calls) and all(ast.unparse(call.func) in LINEAR for call in calls)


def _is_assignment(statement: ast.stmt, name: str) -> TypeGuard[ast.Assign]:
    return isinstance(statement, ast.Assign) and [ast.unparse(target) for target in statement.targets] == [name]


@dataclass
class _Shape:
    """How the logits change: `bias` is added, then they are multiplied by `factors`, then capped."""

    bias: str = ""
    factors: list[str] = field(default_factory=list)
    softcap: str = ""
    operands: list[str] = field(default_factory=list)

    def add(self, operations: list[tuple[str, str]], condition: str = "") -> None:
        """Add (operation, operand) pairs in their order; with `condition`, only where that value is not None.

        Raises:
            UnknownLossError: no kernel computes them.
        """
        operations = list(operations)
        if operations and operations[0][0] == "add" and not (condition or self.bias or self.factors or self.softcap):
            self.bias = operations.pop(0)[1]
        self.operands += [operand for _, operand in operations if operand]
        while operations:
            names, operands = [o[0] for o in operations[:3]], [o[1] for o in operations[:3]]
            if self.softcap:
                raise UnknownLossError("changes the logits after their softcap")
            if names == ["div", "tanh", "mul"] and operands[0] == operands[2] and condition in ("", operands[0]):
                self.softcap = operands[0]
                operations = operations[3:]
            elif names[0] in ("mul", "div"):
                factor = operands[0] if names[0] == "mul" else f"1.0 / ({operands[0]})"
                if condition and condition != operands[0]:
                    raise UnknownLossError(f"changes the logits under the condition `{condition}`")
                self.factors.append(f"({factor} if {condition} is not None else 1.0)" if condition else f"({factor})")
                operations = operations[1:]
            else:
                raise UnknownLossError(f"changes the logits by {names[0]} between head and loss")

    def arguments(self) -> str:
        """The kernel's keyword arguments, each with a comma in front."""
        softcap = f", softcap={self.softcap}" if self.softcap else ""
        return softcap + (f", logit_scale={' * '.join(self.factors)}" if self.factors else "")


def _logit_changes(statements: Sequence[ast.stmt], logits: str) -> tuple[str, ast.expr, _Shape, list[ast.stmt]]:
    """(head, its input, changes of the logits, statements that do not concern the logits)."""
    first, *others = statements
    assert isinstance(first, ast.Assign)
    base, operations = _operations(first.value, logits)
    if not (
        isinstance(base, ast.Call)
        and isinstance(base.func, ast.Attribute)
        and _base_name(base.func) == "self"
        and len(base.args) == 1
        and not base.keywords
    ):
        raise UnknownLossError(f"computes its logits as `{short_source(first.value)}`")
    kept: list[ast.stmt] = []
    # Adjacent statements may form one softcap, so their operations are collected.
    for statement in others:
        if _is_assignment(statement, logits):
            operations += _operations_on(statement.value, logits)
        elif isinstance(statement, ast.AugAssign) and ast.unparse(statement.target) == logits:
            operations += _operations_on(ast.BinOp(ast.Name(logits), statement.op, statement.value), logits)
        elif isinstance(statement, ast.If) and uses_names(statement, logits):
            operations.append(("if", ""))
            operations_inside, condition = _conditional(statement, logits)
            operations[-1] = ("if", condition)
            operations += operations_inside
            operations.append(("endif", ""))
        elif uses_names(statement, logits):
            raise UnknownLossError(f"changes the logits between head and loss: `{short_source(statement)}`")
        else:
            kept.append(statement)
    return ast.unparse(base.func), base.args[0], _shape_of(operations), kept


def _shape_of(operations: list[tuple[str, str]]) -> _Shape:
    """The changes as kernels know them; operations between "if" and "endif" depend on a condition."""
    shape, group, condition = _Shape(), list[tuple[str, str]](), ""
    for name, operand in operations:
        if name in ("if", "endif"):
            shape.add(group, condition)
            group, condition = [], operand
        else:
            group.append((name, operand))
    shape.add(group, condition)
    return shape


def _conditional(statement: ast.If, logits: str) -> tuple[list[tuple[str, str]], str]:
    """Operations in `if C is not None: logits = ...`, and C; a name that C binds is replaced by its value."""
    test = statement.test
    checked = test.left if isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.IsNot) else None
    if checked is None or ast.unparse(test).rpartition(" is not ")[2] != "None" or statement.orelse:
        raise UnknownLossError(f"changes the logits under the condition `{short_source(test)}`")
    operations = []
    for inner in statement.body:
        if not _is_assignment(inner, logits):
            raise UnknownLossError(f"changes the logits between head and loss: `{short_source(inner)}`")
        operations += _operations_on(inner.value, logits)
    if isinstance(checked, ast.NamedExpr):
        name, value = ast.unparse(checked.target), ast.unparse(checked.value)
        return [(op, value if operand == name else operand) for op, operand in operations], value
    return operations, ast.unparse(checked)


def _operations_on(value: ast.expr, logits: str) -> list[tuple[str, str]]:
    base, operations = _operations(value, logits)
    if not (isinstance(base, ast.Name) and base.id == logits):
        raise UnknownLossError(f"changes the logits between head and loss: `{short_source(value)}`")
    return operations


def _operations(value: ast.expr, logits: str) -> tuple[ast.expr, list[tuple[str, str]]]:
    """(what is changed, operations in their order); casts to float32 are left out."""
    operations: list[tuple[str, str]] = []
    while True:
        if isinstance(value, ast.BinOp) and type(value.op) in _OPERATORS:
            left, right = value.left, value.right
            if not isinstance(value.op, ast.Div) and not _computes_logits(left, logits):
                left, right = right, left
            right = _on_its_device(right, logits)
            if uses_names(right, logits):
                return value, operations
            operations.insert(0, (_OPERATORS[type(value.op)], ast.unparse(right)))
            value = left
        elif isinstance(value, ast.Call) and ast.unparse(value.func) in _TANH and len(value.args) == 1:
            operations.insert(0, ("tanh", ""))
            value = value.args[0]
        elif (inner := method_of(value, "tanh")) is not None:
            operations.insert(0, ("tanh", ""))
            value = inner
        elif (inner := without_casts(value)) is not None:
            value = inner
        else:
            return value, operations


def _on_its_device(value: ast.expr, logits: str) -> ast.expr:
    """`x` of `x.to(logits.device)`."""
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == "to":
        return value.func.value if [*map(ast.unparse, value.args)] == [f"{logits}.device"] else value
    return value


def _is_row_buffer(value: str, init: ast.FunctionDef | None) -> bool:
    """Whether the constructor registers it as a buffer [1, N]."""
    name, text = re.escape(value.removeprefix("self.")), ast.unparse(init) if init else ""
    registered = rf"self\.{name} = nn\.Buffer\(|self\.register_buffer\('{name}', "
    return bool(re.search(rf"({registered})torch\.zeros\(\(1, ", text))


def _computes_logits(value: ast.expr, logits: str) -> bool:
    """Whether an operand is the logits, or a call of a module with them."""
    return uses_names(value, logits) or any(isinstance(node, ast.Call) for node in ast.walk(value))


def _is_setting(value: ast.expr, forward: ast.FunctionDef, init: ast.FunctionDef | None) -> bool:
    """Whether an operand is a number or a value of the model's config, and so not a tensor."""
    if isinstance(value, ast.Constant):
        return isinstance(value.value, int | float)
    if isinstance(value, ast.BinOp):
        return _is_setting(value.left, forward, init) and _is_setting(value.right, forward, init)
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "getattr":
        return _is_setting(value.args[0], forward, init)
    if isinstance(value, ast.Name):
        defined = [
            node.value for node in ast.walk(forward) if isinstance(node, ast.Assign) and _is_assignment(node, value.id)
        ]
        return len(defined) == 1 and _is_setting(defined[0], forward, init)
    made = [node.value for node in find_nodes(ast.Assign, init) if _is_assignment(node, ast.unparse(value))]
    if any(isinstance(node, ast.Call) for node in made):
        return False
    inner = value
    while isinstance(inner, ast.Attribute) or (isinstance(inner, ast.Call) and not (inner.args or inner.keywords)):
        inner = inner.value if isinstance(inner, ast.Attribute) else inner.func
    return isinstance(inner, ast.Name) and (
        inner.id == "self" or (inner is not value and _is_setting(inner, forward, init))
    )


def _labels_in_place(init: ast.FunctionDef | None) -> bool:
    """Whether the constructor chooses the loss whose labels are not shifted."""
    return any(ast.unparse(node) == "self.loss_type = 'ForMaskedLM'" for node in find_nodes(ast.Assign, init))


def _check_later_uses(statements: Sequence[ast.stmt], logits: str) -> None:
    """Raise if the logits are used after the loss elsewhere than in the output, which gets None for them."""
    for statement in statements:
        allowed = set[int]()
        for node in ast.walk(statement):
            if isinstance(node, ast.Return) and isinstance(node.value, ast.Call):
                allowed.update(id(keyword.value) for keyword in node.value.keywords)
            elif isinstance(node, ast.Tuple):
                allowed.update(map(id, node.elts))
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and node.id == logits and id(node) not in allowed:
                raise UnknownLossError(f"uses the logits after the loss: `{short_source(statement)}`")


def _sets_none(statement: ast.stmt, later: Sequence[ast.stmt]) -> bool:
    """Whether it assigns None to a variable that `later` assigns unconditionally."""
    if not (isinstance(statement, ast.Assign) and ast.unparse(statement.value) == "None"):
        return False
    target = ast.unparse(statement.targets[0])
    return any(isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == target for line in later)
