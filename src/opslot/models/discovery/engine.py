"""Applies every op's forms to one upstream module and writes the slots that they find.

What upstream code an op can replace is declared in `ops/<op>/forms.py`. Code is matched by an AST fingerprint that
ignores local names, or by a pattern; only reviewed forms get a slot. Everything else keeps Transformers'
implementation, and what looks like an op's is reported as skipped, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from opslot.models.discovery.by_document import run_by_document
from opslot.models.discovery.collected_forms import all_forms, forms_digest
from opslot.models.discovery.common_edits import add_common_edits
from opslot.patchgen import PatchConfig
from opslot.patchgen.forms import ClassFact, Finding, Match, ModuleView, Skip
from opslot.patchgen.names import is_elsewhere, modeling_module
from opslot.patchgen.own_code import changing_decorator
from opslot.patchgen.source import Release, installed_release
from opslot.slots.protocol import KEEPS_SEQUENCES, MASKS_WITHOUT_POSITIONS, SKIPPED

# Ops whose kernels take the boundaries of documents. A class whose recurrence has no slot is skipped by one of them.
RECURRENCES = {"causal_conv1d", "chunk_gated_delta_rule", "mamba_chunk_scan"}


@dataclass(frozen=True)
class Discovery:
    """What was found in one architecture.

    Attributes:
        arch: the folder's name under `transformers/models`, or `architecture_from` of another module's.
        patch: the edits that give its matches their slots.
        matches: upstream code that an op replaces.
        skips: upstream code that looks like an op's and keeps Transformers' implementation.
    """

    arch: str
    patch: PatchConfig
    matches: tuple[Match, ...]
    skips: tuple[Skip, ...]


def discover(arch: str, release: Release | None = None) -> Discovery:
    """Find the slots of an architecture in its upstream source.

    Args:
        arch: the folder's name under `transformers/models`, e.g. "mistral", or `architecture_from` of the name of
            another module, which is imported.
        release: the Transformers release; the installed one by default.

    Raises:
        PatchError: unknown architecture, or a module without source.
    """
    release = release or installed_release()
    return _discover(arch, release, release.module(modeling_module(arch)).digest, forms_digest())


@lru_cache(maxsize=64)
def _discover(arch: str, release: Release, *digests: str) -> Discovery:
    module = ModuleView(release.module(modeling_module(arch)))
    found = list(_findings(module))
    matches = tuple(finding for finding in found if isinstance(finding, Match))
    skips = tuple(finding for finding in found if isinstance(finding, Skip))
    name = module.upstream.name if is_elsewhere(arch) else arch
    patch = PatchConfig(module.upstream.name, description=f"{name} with slots for kernels")
    for match in matches:
        match.write(patch)
    for skip in skips:
        skip.write(patch)
    add_common_edits(patch, module)
    facts = [finding for finding in found if isinstance(finding, ClassFact)]
    for block in dict.fromkeys(fact.final_block for fact in facts if fact.final_block):
        patch.add_final_block(block)
    mixing = [fact for fact in facts if fact.attribute == KEEPS_SEQUENCES]
    with_slots = [fact for fact in mixing if _has_only_slots(RECURRENCES, fact.name, matches, skips)]
    keeping = [fact.name for fact in mixing if fact not in with_slots]
    alone = run_by_document(module, patch, keeping)
    for fact in facts:
        if fact not in with_slots and not (alone and fact.attribute == MASKS_WITHOUT_POSITIONS):
            patch.set_attribute(fact.name, fact.attribute, fact.value)
    for name, entries in skipped_by_class(module, skips).items():
        patch.set_attribute(name, SKIPPED, entries)
    return Discovery(arch, patch, matches, skips)


def _findings(module: ModuleView) -> Iterator[Finding]:
    """What all forms find in a module's own code."""
    for form in all_forms():
        for finding in form(module):
            own = finding if module.upstream.own is None else _of_own_code(module, finding)
            if own is not None:
                yield own


def _of_own_code(module: ModuleView, finding: Finding) -> Finding | None:
    """A finding in a module outside Transformers; None for one in an imported class, or in one with slots by hand.

    An imported function has slots in the methods of the module that call it.
    """
    symbol = finding.name if isinstance(finding, ClassFact) else finding.symbol
    owner = symbol.partition(".")[0]
    if owner not in module.classes:
        callers = module.callers(owner)
        unused = not callers and isinstance(finding, Skip) and module.upstream.is_own(owner)
        return finding if unused or any(map(module.upstream.is_own, callers)) else None
    if not module.upstream.is_own(owner):
        return None
    if isinstance(finding, ClassFact):
        return finding
    if "OpSlot(" in module.text(owner):
        return None
    decorator = changing_decorator(module.classes[owner])
    if decorator and isinstance(finding, Match):
        return Skip(finding.symbol, finding.op, f"has the decorator {decorator}, which may change its methods")
    return finding


def _has_only_slots(ops: set[str], name: str, matches: Iterable[Match], skips: Iterable[Skip]) -> bool:
    """Whether a class has slots of `ops`, and no part that looks like them without."""

    def of_class(found: Match | Skip) -> bool:
        return found.op in ops and found.symbol.partition(".")[0] == name

    return any(map(of_class, matches)) and not any(map(of_class, skips))


def skipped_by_class(module: ModuleView, skips: Iterable[Skip]) -> dict[str, tuple[tuple[str, str, str], ...]]:
    """What `_opslot_skipped` is on each class: (op, symbol, reason).

    A skip belongs to the class that has the symbol; one of a function to all models.
    """
    found: dict[str, list[tuple[str, str, str]]] = {}
    for skip in skips:
        owner = skip.symbol.partition(".")[0]
        owners = [owner] if owner in module.classes else module.models
        for name in owners:
            found.setdefault(name, []).append((skip.op, skip.symbol, skip.reason))
    return {name: tuple(entries) for name, entries in found.items()}
