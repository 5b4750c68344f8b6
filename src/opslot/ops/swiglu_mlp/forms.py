"""Transformers code that swiglu_mlp replaces: activation(gate) * up of a gated MLP. Does not import torch."""

from __future__ import annotations

import ast
import copy
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from opslot.patchgen import PatchConfig, Slot
from opslot.patchgen.forms import ACTIVATION_ATTRIBUTES, Match, ModuleView, Skip, names_in
from opslot.patchgen.upstream import find_nodes
from opslot.slots.protocol import ACTIVATION


@dataclass(frozen=True)
class GatedStatements:
    """Consecutive statements that the slot replaces together.

    Attributes:
        variant: what they compute.
        code: the statements, `self.act_fn` being the activation.
        slotted: what runs instead while a kernel is bound.
        seen: architectures that have them.
    """

    variant: str
    code: str
    slotted: str
    seen: str

    def may_match(self, text: str) -> bool:
        """Whether a method's text has all the names; parsing takes most of the time."""
        return all(word in text for word in re.findall(r"(?<![$\w])[A-Za-z]\w+", self.code))

    def with_activation(self, name: str) -> GatedStatements:
        code, slotted = (text.replace("self.act_fn", name) for text in (self.code, self.slotted))
        return GatedStatements(self.variant, code, slotted, self.seen)


# Functions of torch.nn.functional that kernels compute, as modeling code calls them.
_FUNCTIONAL = r"\b((torch\.)?nn\.functional|F)\.(silu|relu)\b"
_FUSED = "$gated = {slot}($both, self.act_fn)"
_CLAMPED = "return self.down_proj({slot}(self.gate_proj($x), self.up_proj($y), %s))"

_STATEMENTS = (
    GatedStatements(
        "fused_gate_up",
        "$gate, $up = $both.chunk(2, dim=-1)\n$gated = $up * self.act_fn($gate)",
        _FUSED,
        "phi3, glm, glm4",
    ),
    GatedStatements(
        "fused_gate_up",
        "$halves = $both.chunk(2, dim=-1)\n$gated = self.act_fn($halves[0]) * $halves[1]",
        _FUSED,
        "granitemoehybrid, granitemoeshared",
    ),
    GatedStatements(
        "fused_gate_up",
        "$halves = torch.chunk($both, 2, dim=-1)\n$gated = self.act_fn($halves[0]) * $halves[1]",
        _FUSED,
        "zamba2",
    ),
    GatedStatements(
        "fused_gate_up",
        "$gate, $up = $both.chunk(2, dim=-1)\nreturn self.Wo(self.drop(self.act_fn($gate) * $up))",
        "return self.Wo(self.drop({slot}($both, self.act_fn)))",
        "modernbert",
    ),
    GatedStatements(
        "standard",
        "$activated = self.act_fn($gate)\n$up = self.up_proj($x)\n$down = self.down_proj($activated * $up)",
        "$down = self.down_proj({slot}($gate, self.up_proj($x), self.act_fn))",
        "gemma3n",
    ),
    GatedStatements(
        "standard",
        "$activated = self.act_fn(self.wi_0($x))\n$up = self.wi_1($x)\n$gated = $activated * $up",
        "$gated = {slot}(self.wi_0($x), self.wi_1($x), self.act_fn)",
        "t5, mt5, umt5, longt5, pop2piano, udop",
    ),
    GatedStatements(
        "clamped",
        "$gate = self.gate_proj($x).clamp(max=self.limit)\n"
        "$up = self.up_proj($y).clamp(min=-self.limit, max=self.limit)\n"
        "return self.down_proj(self.act_fn($gate) * $up)",
        _CLAMPED % "self.limit",
        "deepseek_v4",
    ),
    GatedStatements(
        "clamped",
        "$gate = self.gate_proj($x)\n"
        "$up = self.up_proj($y)\n"
        "$gate = $gate.clamp(min=None, max=self.swiglu_limit)\n"
        "$up = $up.clamp(min=-self.swiglu_limit, max=self.swiglu_limit)\n"
        "return self.down_proj(self.act_fn($gate) * $up)",
        _CLAMPED % "self.swiglu_limit",
        "glm5_next",
    ),
)


def find_gated_mlps(module: ModuleView) -> Iterator[Match | Skip]:
    """The product of act(gate) and up, which have one shape: two projections of one width, or halves of a tensor."""
    for name, forward in module.methods():
        if name.endswith("Experts"):
            continue  # moe_experts replaces them as a whole
        text = module.text(forward)
        used = [f"self.{act}" for act in ACTIVATION_ATTRIBUTES if re.search(rf"self\.{act}\(", text)]
        used = used or sorted({found.group() for found in re.finditer(rf"{_FUNCTIONAL}(?=\()", text)})
        match = _match(module, name, forward, used[0]) if len(used) == 1 and " * " in text else None
        if match is not None:
            yield match
        elif name.endswith("MLP") and "act" in text and re.search(r"\w\)? \* ", text):
            reason = "computes something else than act(gate) * up, with gate and up of one shape"
            yield Skip(name, "swiglu_mlp", reason)


def _match(module: ModuleView, name: str, forward: str, activation: str) -> Match | None:
    for row in (row.with_activation(activation) for row in _STATEMENTS):
        if row.may_match(module.text(forward)) and module.count(forward, row.code) == 1:
            return _match_statements(name, forward, row, activation)
    products = Counter(_products_of_one_shape(module, name, activation))
    whole = [form for form in (f"{activation}($gate) * $up", f"$up * {activation}($gate)") if products]
    counts = [module.count(forward, form) for form in whole]
    if sum(counts) == 1:
        pattern = whole[counts.index(1)]
        return _match_products(name, forward, {pattern: (f"$gate, $up, {activation}", 1)}, activation)
    # Of several products, those whose shapes are unknown keep the module's own code.
    found = {
        text: (f"{gate}, {up}, {activation}", count)
        for (text, gate, up), count in products.items()
        if module.count(forward, text) == count
    }
    return _match_products(name, forward, found, activation) if found else None


def _match_statements(name: str, forward: str, row: GatedStatements, activation: str) -> Match:
    slot = Slot("swiglu_mlp", row.variant)
    bound = f"self.{slot.attribute}"

    def write(patch: PatchConfig) -> None:
        patch.replace(
            forward,
            row.code,
            f"if {bound} is not None:\n    {row.slotted.format(slot=bound)}\nelse:\n    $match",
            slot=slot,
        )
        _name_activation(patch, name, activation)

    return Match(name, slot.op, slot.variant, write)


def _match_products(name: str, forward: str, products: Mapping[str, tuple[str, int]], activation: str) -> Match:
    """The match of products with one activation: by pattern, the kernel's arguments and the number of places."""
    slot = Slot("swiglu_mlp", "standard")

    def write(patch: PatchConfig) -> None:
        for pattern, (args, count) in products.items():
            patch.slot_expr(forward, slot, pattern, args=args, count=count)
        _name_activation(patch, name, activation)

    return Match(name, slot.op, slot.variant, write)


def _name_activation(patch: PatchConfig, name: str, activation: str) -> None:
    """State the activation of a class that calls a function and holds no module."""
    if not activation.startswith("self."):
        patch.set_attribute(name, ACTIVATION, activation.rpartition(".")[2])


def _products_of_one_shape(module: ModuleView, name: str, activation: str) -> Iterator[tuple[str, str, str]]:
    """The texts (product, gate, up) of products with the activation whose gate and up have one shape.

    Kernels do not broadcast.
    """
    forward, init = (module.upstream.find(f"{name}.{method}") for method in ("forward", "__init__"))
    if isinstance(forward, ast.FunctionDef) and isinstance(init, ast.FunctionDef):
        yield from _products(forward.body, _Shapes(init), activation)


def _products(statements: Sequence[ast.stmt], shapes: _Shapes, activation: str) -> Iterator[tuple[str, str, str]]:
    for statement in statements:
        if isinstance(statement, ast.If):
            for branch in (statement.body, statement.orelse):
                yield from _products(branch, copy.copy(shapes), activation)
        else:
            for node in find_nodes(ast.BinOp, statement):
                for activated, up in ((node.left, node.right), (node.right, node.left)):
                    if (
                        isinstance(node.op, ast.Mult)
                        and isinstance(activated, ast.Call)
                        and ast.unparse(activated.func) == activation
                        and shapes.of(activated.args[0]) == shapes.of(up) is not None
                    ):
                        yield ast.unparse(node), ast.unparse(activated.args[0]), ast.unparse(up)
        shapes.follow(statement)


class _Shapes:
    """Shapes of expressions in a forward, as texts: equal texts are equal shapes.

    Args:
        init: the constructor, where the projections are.
    """

    def __init__(self, init: ast.FunctionDef) -> None:
        self._made: dict[str, ast.expr | None] = {}
        for node in find_nodes(ast.Assign, init):
            for target in node.targets:
                for element in target.elts if isinstance(target, ast.Tuple) else (target,):
                    attribute = ast.unparse(element)
                    self._made[attribute] = None if attribute in self._made else node.value
        self._names: dict[str, str | None] = {}
        self._assignments = 0

    def __copy__(self) -> _Shapes:
        other = object.__new__(_Shapes)
        other._made, other._names, other._assignments = self._made, dict(self._names), self._assignments
        return other

    def follow(self, statement: ast.stmt) -> None:
        """Go past a statement of the forward."""
        shapes: list[tuple[ast.expr, str | None]] = []
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            target, value = statement.targets[0], statement.value
            half = self._half(value)
            if isinstance(target, ast.Tuple) and half is not None:
                shapes = [(element, half) for element in target.elts]
            elif isinstance(target, ast.Name):
                shapes = [(target, f"halves:{half}" if half is not None else self.of(value))]
        self._assignments += 1
        for node in find_nodes(ast.Name, statement):
            if isinstance(node.ctx, ast.Store):
                self._names[node.id] = f"{node.id} after {self._assignments} statements"
        for element, shape in shapes:
            if isinstance(element, ast.Name) and shape is not None:
                self._names[element.id] = shape

    def of(self, value: ast.expr) -> str | None:
        """The shape of an expression; None if it is unknown."""
        match value:
            case ast.Name(id=name):
                return self._names.get(name, name)
            case ast.Call(func=ast.Attribute(value=base, attr="float" | "clamp" | "to" | "contiguous")):
                return self.of(base)
            case ast.Call(func=ast.Attribute(value=ast.Name(id="self")) as projection, args=[x]):
                return self._projected(ast.unparse(projection), x)
            case ast.BinOp(op=ast.Mult(), left=left, right=ast.Attribute(value=ast.Name(id="self")) as factor):
                made = self._made.get(ast.unparse(factor))
                return self.of(left) if made is not None and _is_number_of_config(made) else None
            case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=0 | 1)):
                shape = self._names.get(name) or ""
                return shape.removeprefix("halves:") if shape.startswith("halves:") else None
            case ast.Subscript(
                value=base, slice=ast.Tuple(elts=[ast.Constant(value=x), ast.Constant(value=0 | 1), ast.Slice()])
            ) if x is Ellipsis:
                return f"part of {self.of(base)}"
        return None

    def _projected(self, projection: str, x: ast.expr) -> str | None:
        """The shape of `self.projection(x)`: that of x but for the width, the constructor's second argument."""
        made, shape = self._made.get(projection), self.of(x)
        if not isinstance(made, ast.Call) or len(made.args) < 2 or shape is None:
            return None
        return f"{ast.unparse(made.func)}({ast.unparse(made.args[1])}) of {shape}"

    def _half(self, value: ast.expr) -> str | None:
        """The shape of both halves, if the expression splits a tensor into two along its last dim."""
        if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute) or value.func.attr != "chunk":
            return None
        whole = value.func.value
        rest = [ast.unparse(a) for a in value.args] + [f"{k.arg}={ast.unparse(k.value)}" for k in value.keywords]
        if ast.unparse(whole) == "torch":
            whole, rest = value.args[0], rest[1:]
        return f"half of {ast.unparse(whole)}" if rest in (["2", "dim=-1"], ["2", "-1"]) else None


def _is_number_of_config(made: ast.expr) -> bool:
    """Whether a constructor's value is read from the config, so not a module and not a parameter."""
    return not isinstance(made, ast.Call) and "config" in names_in(made)


FORMS = (find_gated_mlps,)
