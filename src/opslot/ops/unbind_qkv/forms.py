"""Transformers code that unbind_qkv replaces: q, k and v taken out of one tensor. Does not import torch."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from opslot.patchgen import PatchConfig, Slot
from opslot.patchgen.forms import Match, ModuleView

_SLOT = Slot("unbind_qkv", "standard")
# Of a tensor [S, 3, heads, D], and of [..., 3, heads, D].
_PATTERNS = ("$qkv.permute(1, 0, 2, 3).unbind(0)", "$qkv.unbind(dim=-3)")


@dataclass(frozen=True)
class UnboundProjections:
    """Assignments of three slices along the third dimension from the end to names of queries, keys and values."""

    def find(self, module: ModuleView) -> Iterator[Match]:
        for name, forward in module.methods():
            found = {pattern: count for pattern in _PATTERNS if (count := module.count(forward, pattern))}
            definition = module.upstream.find(forward)
            if found and definition is not None and _unpacks(definition, sum(found.values())):
                yield Match(name, _SLOT.op, _SLOT.variant, _Write(forward, found))


def _unpacks(definition: ast.AST, count: int) -> bool:
    """Whether each of the `count` results of `unbind` is assigned to such names."""
    unpacked = [
        node
        for node in ast.walk(definition)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Attribute)
        and node.value.func.attr == "unbind"
        and all(_initials(target) == ["q", "k", "v"] for target in node.targets)
    ]
    return len(unpacked) == count


def _initials(target: ast.expr) -> list[str]:
    return [ast.unparse(name)[0] for name in target.elts] if isinstance(target, ast.Tuple) else []


@dataclass(frozen=True)
class _Write:
    """Routes the expressions of a method through the slot; `found` counts them by pattern."""

    method: str
    found: dict[str, int]

    def __call__(self, patch: PatchConfig) -> None:
        for pattern, count in self.found.items():
            patch.slot_expr(self.method, _SLOT, pattern, args="$qkv", count=count)


FORMS = (UnboundProjections(),)
