"""Transformers code that expand_kv replaces: keys with a part that all heads share. Does not import torch.

From 5.16, a method expands compressed keys and values after the cache; before, the attention's forward does.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from opslot.patchgen import PatchConfig, Slot
from opslot.patchgen.forms import Match, ModuleView

_SLOT = Slot("expand_kv")
_BOUND = f"self.{_SLOT.attribute}"
# Of `expand_kv(self, kv_nope, k_rot)`: the up-projection of kv_nope, whose heads are split into keys and values, and an
# empty tensor that both parts of the keys are copied to. In deepseek_v2, deepseek_v3 and 15 more, from 5.16.
_METHOD = "313b46fcd781"


def find_expanding_methods(module: ModuleView) -> Iterator[Match]:
    """Methods of that fingerprint."""
    for name in module.classes:
        for method in (f"{name}.{each}" for each in module.own_methods(name)):
            if "kv_b_proj" in module.text(method) and module.fingerprint(method) == _METHOD:
                yield Match(name, _SLOT.op, _SLOT.variant, partial(_write_method, method, module.parameters(method)[1]))


def _write_method(method: str, k_rot: str, patch: PatchConfig) -> None:
    """Return what the slot computes, in the dtype that the copies have."""
    patch.replace(
        method,
        "$k_nope, $value = torch.split($kv, [$nope, $width], dim=-1)",
        f"""
        if {_BOUND} is not None:
            return {_BOUND}($kv, {k_rot}.to($kv.dtype), $nope)
        $match
        """,
        slot=_SLOT,
    )


@dataclass(frozen=True)
class _Statements:
    """Three statements of a forward, and the names in them.

    Attributes:
        split: `k_nope, value = torch.split(kv, [nope, width], dim=-1)`.
        expand: `k_rot = k_rot.expand(...)`, to the heads of k_nope.
        concatenate: `key = torch.cat((k_nope, k_rot), dim=-1)`.
    """

    split: ast.Assign
    expand: ast.Assign
    concatenate: ast.Assign
    kv: str
    k_nope: str
    value: str
    k_rot: str
    nope: str


def find_expanded_keys(module: ModuleView) -> Iterator[Match]:
    """`_Statements` in a forward, with nothing else that uses their names in between."""
    for name, forward in module.methods():
        if ".expand(" in module.text(forward):
            definition = module.function(forward)
            found = [each for each in _find_statements(definition.body) if _is_closed(definition, each)]
            if len(found) == 1:
                yield Match(name, _SLOT.op, _SLOT.variant, partial(_write_statements, forward, found[0]))


def _find_statements(body: list[ast.stmt]) -> Iterator[_Statements]:
    assignments = [each for each in body if isinstance(each, ast.Assign)]
    by_text = {ast.unparse(each.value): each for each in assignments}
    for split in assignments:
        match split:
            case ast.Assign(
                targets=[ast.Tuple(elts=[ast.Name(id=k_nope), ast.Name(id=value)])],
                value=ast.Call(args=[ast.Name(id=kv), ast.List(elts=[nope, width])]) as call,
            ) if ast.unparse(call) == f"torch.split({kv}, [{ast.unparse(nope)}, {ast.unparse(width)}], dim=-1)":
                pass
            case _:
                continue
        for expand in assignments:
            k_rot = ast.unparse(expand.targets[0])
            if ast.unparse(expand.value) in (
                f"{k_rot}.expand(*{k_nope}.shape[:-1], -1)",
                f"{k_rot}.expand(-1, {k_nope}.shape[1], -1, -1)",
            ):
                concatenate = by_text.get(f"torch.cat(({k_nope}, {k_rot}), dim=-1)")
                if concatenate is not None:
                    yield _Statements(split, expand, concatenate, kv, k_nope, value, k_rot, ast.unparse(nope))


def _is_closed(definition: ast.FunctionDef, found: _Statements) -> bool:
    """Whether the statements are in that order, and only they use their names from the split on, but for the value."""
    order = [found.split.lineno, found.expand.lineno, found.concatenate.lineno]
    names = [node for node in ast.walk(definition) if isinstance(node, ast.Name)]

    def lines(name: str, first: int, last: float = float("inf")) -> list[int]:
        return sorted(node.lineno for node in names if node.id == name and first <= node.lineno <= last)

    _, expand, concatenate = order
    return (
        order == sorted(order)
        and lines(found.k_nope, found.split.lineno + 1) == [expand, concatenate]
        and lines(found.k_rot, expand) == [expand, expand, concatenate]
        and lines(found.value, found.split.lineno + 1, concatenate) == []
    )


def _write_statements(forward: str, found: _Statements, patch: PatchConfig) -> None:
    """Leave the heads whole, and let the slot compute keys and values where keys are concatenated."""
    whole = f"{found.k_nope} = {found.kv}"
    patch.replace(forward, ast.unparse(found.split), f"if {_BOUND} is not None:\n    {whole}\nelse:\n    $match")
    patch.replace(forward, ast.unparse(found.expand), f"if {_BOUND} is None:\n    $match")
    results = f"{ast.unparse(found.concatenate.targets[0])}, {found.value}"
    patch.replace(
        forward,
        ast.unparse(found.concatenate),
        f"""
        if {_BOUND} is not None:
            {results} = {_BOUND}({found.k_nope}, {found.k_rot}, {found.nope})
        else:
            $match
        """,
        slot=_SLOT,
    )


FORMS = (find_expanding_methods, find_expanded_keys)
