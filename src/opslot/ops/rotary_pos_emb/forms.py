"""Transformers code that rotary_pos_emb replaces: calls of a rotary function, alone and with what surrounds them.

Does not import torch.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import partial

# Discovery loads these two first, so this does not import their packages, which import torch.
from opslot.ops.rms_norm.forms import NORMS
from opslot.ops.rotary_pos_emb.apply_forms import (
    OP,
    ROWS,
    RotaryForm,
    find_rotary_functions,
    mismatch,
    rotary_functions,
)
from opslot.patchgen import PatchConfig, Slot
from opslot.patchgen.forms import Match, ModuleView, Reviewed
from opslot.patchgen.normed_heads import NormedHeads, normed_heads
from opslot.patchgen.split_tensors import SplitTensor, split_and_concatenated

# What a rotary function computes -> the variant that computes it of the last channels of queries.
_OF_LAST_CHANNELS = {
    "full": "partial_last",
    "gptj_to_neox": "gptj_to_neox_last",
    "gptj_fp32": "gptj_fp32_last",
}


def find_latent_queries(module: ModuleView) -> Iterator[Match]:
    """Queries that are split, rotated in their last channels and concatenated again, as in latent attention.

    The slots are next to those of the rotary function, which serve where a kernel has no form for such queries.
    """
    for name, method in module.methods():
        if "torch.cat" not in module.text(method):
            continue
        for split in split_and_concatenated(module.function(method)):
            forms = [_form(module, rotation, split.last) for rotation in split.between]
            if forms and None not in forms:
                yield from _of_last_channels(name, method, split, [form for form in forms if form])


def _form(module: ModuleView, rotation: ast.Assign, last: str) -> RotaryForm | None:
    """The form of `q_rot, k_rot = function(q_rot, k_rot, cos, sin)`, q_rot being `last`."""
    match rotation:
        case ast.Assign(
            targets=[ast.Tuple(elts=[ast.Name(id=q_out), ast.Name()])],
            value=ast.Call(func=ast.Name(id=name), args=[ast.Name(id=q), *_]),
        ) if q == q_out == last:
            form = next((row for row in ROWS if row.matches(module, name)), None)
            if form is not None and form.variant in _OF_LAST_CHANNELS and not mismatch(module, name, form):
                return form
    return None


def _of_last_channels(name: str, method: str, split: SplitTensor, forms: list[RotaryForm]) -> Iterator[Match]:
    """The matches of the rotations of one split tensor; the first one also writes the concatenation."""
    for i, (rotation, form) in enumerate(zip(split.between, forms, strict=True)):
        slot = Slot(OP, _OF_LAST_CHANNELS[form.variant], name=f"{form.slot.suffix}_last")

        def write(
            patch: PatchConfig,
            rotation: ast.Assign = rotation,
            form: RotaryForm = form,
            slot: Slot = slot,
            first: bool = i == 0,
        ) -> None:
            call = rotation.value
            assert isinstance(call, ast.Call)
            _, *others = form.arguments(call) or []
            arguments = [form.kernel_arguments([split.tensor, *others]), *form.options_of(call)]
            results = ", ".join(
                ast.unparse(name) for name in ast.walk(rotation.targets[0]) if isinstance(name, ast.Name)
            )
            kernel = f"self.{slot.attribute}"
            patch.replace(
                method,
                f"{results} = {ast.unparse(call)}",
                f"""
                if {kernel} is not None:
                    {split.first} = None
                    {results} = {kernel}({", ".join(arguments)})
                else:
                    $match
                """,
                slot=slot,
            )
            if first:
                whole = f"({split.last} if {split.first} is None else $match)"
                patch.replace(method, ast.unparse(split.concatenation), whole)

        yield Match(name, OP, slot.variant, write)


# What a rotary function computes -> the variants that also normalize, before it and after it.
_WITH_NORM = {
    "full": ("norm_full", "full_norm"),
    "full_fp32": ("norm_full_fp32", "full_fp32_norm"),
    "partial": ("norm_partial", None),
}
_NORM_OPTIONS = {
    "standard": (),
    "weight_offset": ("weight_offset=True",),
    "cast_after_weight": ("cast_after_weight=True",),
}


def find_normed_and_rotated(module: ModuleView) -> Iterator[Match]:
    """Heads of queries and keys that have an RMSNorm right before or after the rotation.

    The slots are next to those of the norms and of the rotary function, which serve where a kernel has no form of both,
    or the norms may not be replaced.
    """
    rotations = [
        (name, form)
        for name, form in rotary_functions(module)
        if form and form.variant in _WITH_NORM and not form.inverse and not mismatch(module, name, form)
    ]
    for owner, method in module.methods():
        found = [
            (form, heads)
            for name, form in rotations
            if module.calls(method, name)
            for heads in normed_heads(module.function(method), name)
        ]
        if len(found) == 1:
            yield from _match(module, owner, method, *found[0])


def _match(module: ModuleView, owner: str, method: str, form: RotaryForm, heads: NormedHeads) -> Iterator[Match]:
    variant = _WITH_NORM[form.variant][heads.is_last]
    row, other = (_row(module, owner, _norm_name(norm)) for norm in heads.norms)
    anchors = (heads.before, *heads.norms, heads.call)
    is_found = all(module.count(method, ast.unparse(node)) == 1 for node in anchors)
    if variant is not None and row is not None and row == other and is_found:
        slot = Slot(OP, variant, name=f"{form.slot.suffix}_norm")
        yield Match(owner, OP, variant, partial(_write_normed, method, slot, form, heads, row))


def _row(module: ModuleView, owner: str, norm: str) -> Reviewed | None:
    """The form of the only class that a constructor gives the attribute `norm`, if a variant has it."""
    made = set(re.findall(rf"self\.{norm} = (.+?)\(", module.text(f"{owner}.__init__")))
    name = made.pop() if len(made) == 1 else ""
    row = NORMS.row(module, name) if name in module.classes else None
    return row if row is not None and row.variant in _NORM_OPTIONS and row.returns == "{call}" else None


def _norm_name(call: ast.Call) -> str:
    """The attribute of `self.<norm>(x)`."""
    return ast.unparse(call.func).removeprefix("self.")


def _write_normed(
    method: str, slot: Slot, form: RotaryForm, heads: NormedHeads, row: Reviewed, patch: PatchConfig
) -> None:
    """Decide before the first of the calls; then skip the norms, and let the slot compute all three at the function."""
    call = heads.call.value
    assert isinstance(call, ast.Call)
    kernel, norms = f"self.{slot.attribute}", [f"self.{_norm_name(norm)}" for norm in heads.norms]
    tests = [f"{kernel} is not None", *heads.conditions, f"{kernel}.can_serve({', '.join(norms)})"]
    patch.insert_after(method, ast.unparse(heads.before), f"with_norms = {' and '.join(tests)}")
    for norm in heads.norms:
        patch.replace(method, ast.unparse(norm), f"({ast.unparse(norm.args[0])} if with_norms else $match)")
    q, k = map(ast.unparse, call.args[:2])
    # Of each norm, "self.weight, self.eps".
    values = [
        row.args.removeprefix("{0}, ").format(x, rest="").replace("self.", f"{norm}.").rpartition(", ")
        for x, norm in zip((q, k), norms, strict=True)
    ]
    rotated = form.kernel_arguments(form.arguments(call) or [])
    arguments = [rotated, *(weight for weight, *_ in values), *(eps for *_, eps in values)]
    options = [*_NORM_OPTIONS[row.variant], *form.options_of(call)]
    patch.replace(
        method,
        ast.unparse(heads.call),
        f"""
        if with_norms:
            {q}, {k} = {kernel}({", ".join([*arguments, *options])})
        else:
            $match
        """,
        slot=slot,
    )


FORMS = (find_normed_and_rotated, find_latent_queries, find_rotary_functions)
