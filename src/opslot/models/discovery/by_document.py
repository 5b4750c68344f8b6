"""Modules of decoder layers that run once for each packed document. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from opslot.models.discovery.sequences import decoder_layers, parts_of
from opslot.patchgen import PatchConfig
from opslot.patchgen.forms import ModuleView, names_in
from opslot.patchgen.packed_documents import documents_reach, pass_documents_to, takes_documents
from opslot.slots.protocol import BY_DOCUMENT

_DECORATOR = "opslot.ops._common.by_document", "by_document"


def run_by_document(module: ModuleView, patch: PatchConfig, keeping: Iterable[str]) -> bool:
    """Let the parts of decoder layers in which classes `keeping` sequences unsplit are run once for each document.

    Not those that the boundaries of documents do not reach.

    Returns:
        Whether all attention runs so, and gets the part of a document of any mask.
    """
    owners = list(dict.fromkeys(_outermost(module, {*keeping})))
    alone = bool(owners) and not any("ALL_ATTENTION_FUNCTIONS" in module.text(name) for name in module.classes)
    for owner in owners:
        definer = _definer(module, owner)
        if definer is None or not takes_documents(module, owner) or not documents_reach(module, owner):
            alone = False
            continue
        patch.decorate(f"{definer}.forward", *_DECORATOR)
        patch.set_attribute(owner, BY_DOCUMENT, True)
        pass_documents_to(module, patch, owner)
    return alone


def _outermost(module: ModuleView, keeping: set[str]) -> Iterator[str]:
    """The children of decoder layers that consist of such classes; a layer itself where it is one of them."""
    for layer in decoder_layers(module):
        if layer in keeping:
            yield layer
            continue
        for child in _children(module, layer):
            if keeping & {*parts_of(module, [child])}:
                yield child


def _children(module: ModuleView, name: str) -> list[str]:
    """The classes whose instances the constructors of a class and of its bases make."""
    made = set()
    for own in (name, *module.bases(name)):
        constructor = module.upstream.find(f"{own}.__init__")
        for used in sorted(names_in(constructor)) if constructor is not None else ():
            made |= module.tables.get(used, {used}) & module.classes.keys()
    return sorted(made)


def _definer(module: ModuleView, name: str) -> str | None:
    """The class, `name` or one that it derives from, that defines its forward."""
    if name not in module.classes:
        return None
    if "forward" in module.own_methods(name):
        return name
    return next((found for base in module.bases(name) if (found := _definer(module, base)) is not None), None)
