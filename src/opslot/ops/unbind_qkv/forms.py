"""Transformers code that unbind_qkv replaces: q, k and v taken out of one tensor. Does not import torch."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import partial

from opslot.patchgen import PatchConfig, Slot
from opslot.patchgen.forms import Match, ModuleView
from opslot.patchgen.upstream import find_nodes

_SLOT = Slot("unbind_qkv", "standard")
# Of a tensor [S, 3, heads, D], and of [..., 3, heads, D].
_PATTERNS = ("$qkv.permute(1, 0, 2, 3).unbind(0)", "$qkv.unbind(dim=-3)")


def find_unbound_projections(module: ModuleView) -> Iterator[Match]:
    """Assignments of three slices along the third dimension from the end to names of queries, keys and values."""
    for name, forward in module.methods():
        if "unbind" not in module.text(forward):
            continue
        found = {pattern: count for pattern in _PATTERNS if (count := module.count(forward, pattern))}
        if found and _unpacks(module.function(forward), sum(found.values())):
            yield Match(name, _SLOT.op, _SLOT.variant, partial(_write, forward, found))


def _unpacks(definition: ast.AST, count: int) -> bool:
    """Whether each of the `count` results of `unbind` is assigned to such names."""
    unpacked = [
        node
        for node in find_nodes(ast.Assign, definition)
        if isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Attribute)
        and node.value.func.attr == "unbind"
        and all(_initials(target) == ["q", "k", "v"] for target in node.targets)
    ]
    return len(unpacked) == count


def _initials(target: ast.expr) -> list[str]:
    return [ast.unparse(name)[0] for name in target.elts] if isinstance(target, ast.Tuple) else []


def _write(method: str, found: dict[str, int], patch: PatchConfig) -> None:
    """Route the expressions of a method through the slot; `found` counts them by pattern."""
    for pattern, count in found.items():
        patch.slot_expr(method, _SLOT, pattern, args="$qkv", count=count)


_SLICED = Slot("unbind_qkv", "sliced")


def find_sliced_projections(module: ModuleView) -> Iterator[Match]:
    """Three assignments of adjacent slices of the last dimension, which are then viewed as heads."""
    for name, forward in module.methods():
        if found := _slices(module.function(forward)):
            yield Match(name, _SLICED.op, _SLICED.variant, partial(_write_slices, forward, found))


def _slices(definition: ast.FunctionDef) -> list[ast.Assign] | None:
    """The assignments of the slices of q, k and v, one after another; None if there are none."""
    body = definition.body
    for i in range(len(body) - 2):
        three = [node for node in body[i : i + 3] if isinstance(node, ast.Assign)]
        bounds = [_bounds(node) for node in three]
        if len(three) == 3 and None not in bounds and _are_adjacent([b for b in bounds if b is not None]):
            names = [ast.unparse(node.targets[0]) for node in three]
            text = ast.unparse(definition)
            is_viewed = all(f"{name}.view(hidden_shape)" in text for name in names)
            has_heads = "hidden_shape = (*input_shape, -1, self.head_dim)" in text
            if [name[0] for name in names] == ["q", "k", "v"] and is_viewed and has_heads:
                return three
    return None


def _bounds(node: ast.Assign) -> tuple[str, str, str] | None:
    """The source text of x, of a and of b in `name = x[..., a:b]`; None for another assignment."""
    value = node.value
    if not isinstance(value, ast.Subscript) or not isinstance(value.slice, ast.Tuple) or len(value.slice.elts) != 2:
        return None
    first, last = value.slice.elts
    if ast.unparse(first) != "..." or not isinstance(last, ast.Slice) or last.step is not None:
        return None
    lower, upper = ("" if bound is None else ast.unparse(bound) for bound in (last.lower, last.upper))
    return ast.unparse(value.value), lower, upper


def _are_adjacent(bounds: list[tuple[str, str, str]]) -> bool:
    (x, start, query_end), (y, key_start, key_end), (z, value_start, end) = bounds
    return x == y == z and start == end == "" and query_end == key_start != "" and key_end == value_start != ""


def _write_slices(method: str, slices: list[ast.Assign], patch: PatchConfig) -> None:
    """Route three assignments of a method through the slot."""
    bounds = [bound for node in slices if (bound := _bounds(node)) is not None]
    names = ", ".join(ast.unparse(node.targets[0]) for node in slices)
    kernel = f"self.{_SLICED.attribute}"
    call = f"{kernel}({bounds[0][0]}, {bounds[0][2]}, {bounds[1][2]}, self.head_dim)"
    patch.replace(
        method,
        "\n".join(map(ast.unparse, slices)),
        f"if {kernel} is not None:\n    {names} = {call}\nelse:\n    $match",
        slot=_SLICED,
    )


FORMS = (find_unbound_projections, find_sliced_projections)
