"""Applies a patch to a release's module and renders the result."""

from __future__ import annotations

from functools import singledispatch

import libcst as cst

from opslot._base.errors import PatchError
from opslot.patchgen.anchoring import apply_anchored
from opslot.patchgen.config import PatchConfig
from opslot.patchgen.edited_module import EditedModule
from opslot.patchgen.edits import (
    Anchored,
    ClassAttribute,
    ConfigSlot,
    Decorate,
    Edit,
    Exclude,
    InheritMethod,
    SlotCalls,
    SlotLoss,
    SlotMethod,
    TakeKeywords,
    UndecoratedCopy,
)
from opslot.patchgen.exclusion import apply_exclusions
from opslot.patchgen.inheritance import apply_inherit_method
from opslot.patchgen.module_edits import finish_module
from opslot.patchgen.primitives import ExternalReplacement, Replacement
from opslot.patchgen.replacements import apply_external, apply_replacement, apply_undecorated_copy
from opslot.patchgen.slotting import (
    apply_decorate,
    apply_slot_calls,
    apply_slot_loss,
    apply_slot_method,
    apply_take_keywords,
)
from opslot.patchgen.source import Release


def generate(patch: PatchConfig, release: Release) -> str:
    """The text of the module of `release` with `patch` applied. The same patch and release give the same bytes.

    Raises:
        PatchError: a symbol or anchor is missing, matches another number of times, has another body than the
            patch expects, or two edits change the same code.
    """
    edited, problems = apply_all(patch, release)
    if problems:
        raise PatchError(
            "\n".join(str(problem) for problem in problems),
            hint="adapt the patch to this release, or use a release that it applies to",
        )
    edited.write_slot_declarations()
    finish_module(edited)
    return edited.module.code


def apply_all(patch: PatchConfig, release: Release) -> tuple[EditedModule, list[PatchError]]:
    """Apply every edit that can be, and collect the problems of the others."""
    check_conflicts(patch)
    edited = EditedModule(patch, release)
    problems = []
    exclusions = [edit for edit in patch.edits if isinstance(edit, Exclude)]
    for edit in patch.edits:
        if isinstance(edit, Exclude):
            continue
        try:
            apply(edit, edited)
        except PatchError as problem:
            problems.append(problem)
        except cst.ParserSyntaxError as error:
            problems.append(edited.fail(edit, f"its text is not Python code: {error}"))
    # Last, since other edits, wherever they are written, may remove the uses of what is excluded.
    try:
        apply_exclusions(exclusions, edited)
    except PatchError as problem:
        problems.append(problem)
    return edited, problems


def check_conflicts(patch: PatchConfig) -> None:
    """Raise when an edit that replaces a symbol meets another edit of that symbol, or of one inside it."""
    for index, first in enumerate(patch.edits):
        for second in patch.edits[index + 1 :]:
            if isinstance(first, _UNPLACED) or isinstance(second, _UNPLACED):
                continue
            both_in_front = isinstance(first, SlotMethod) and isinstance(second, SlotMethod)
            overlap = _replaces(first, second) or _replaces(second, first)
            if overlap or (both_in_front and first.target == second.target):
                raise PatchError(
                    f"two patches of {patch.source_module} edit the same code",
                    found=f"`{first.summary}` ({first.target}) and `{second.summary}` ({second.target})",
                    hint="drop one of them",
                )


def _replaces(first: Edit, second: Edit) -> bool:
    """Whether `first` replaces what `second` changes."""
    targets = second.whole or (second.target,)
    return any(target == whole or target.startswith(f"{whole}.") for whole in first.whole for target in targets)


# Edits that share their targets with others.
_UNPLACED = (SlotCalls, ClassAttribute, ConfigSlot, Decorate, TakeKeywords)


@singledispatch
def apply(edit: Edit, edited: EditedModule) -> None:
    """Apply one edit to the module."""
    raise TypeError(f"no way to apply {type(edit).__name__}")


apply.register(SlotMethod)(apply_slot_method)
apply.register(SlotCalls)(apply_slot_calls)
apply.register(SlotLoss)(apply_slot_loss)
apply.register(Anchored)(apply_anchored)
apply.register(InheritMethod)(apply_inherit_method)
apply.register(Replacement)(apply_replacement)
apply.register(ExternalReplacement)(apply_external)
apply.register(UndecoratedCopy)(apply_undecorated_copy)
apply.register(Decorate)(apply_decorate)
apply.register(TakeKeywords)(apply_take_keywords)
apply.register(ClassAttribute)(lambda edit, edited: edited.set_attribute(edit))
apply.register(ConfigSlot)(lambda edit, edited: None)
