"""What the modules of a model compute for: the tokens of its text, patches of images, or frames of audio."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from opslot.models._multimodal.audio import AUDIO_CONFIGS, METHOD

TOKENS, PATCHES, FRAMES = "", "image", "audio"
# Embeddings of media in models without encoders.
_MEDIA = re.compile("(?i)vision|image|visual|audio")


def streams_of(modules: dict[str, Any], output: Any) -> Iterator[tuple[str, str | None]]:
    """By module: TOKENS, PATCHES, FRAMES, or None for a tower of another kind.

    A tower is a model inside another whose config is of another class than the text's. What a model with a tower holds
    besides its models and the output layer is a projector, and belongs to the patches, or to the frames where the
    model has no patches or the name has "audio". A module beside the text's layers that holds towers of one kind has
    their projector. Without a tower, modules of these names beside a language model embed media.
    """
    models = {path: module for path, module in modules.items() if is_model(module)}
    towers = {path: kind for path, module in models.items() if (kind := _tower(path, module, models)) != TOKENS}
    for path, module in modules.items():
        around = [path, *parents_of(path)]
        tower = next((towers[p] for p in around if p in towers), TOKENS)
        owner = next((p for p in around if p in models), None)
        inside = [p for p in models if p != owner and p.startswith(f"{owner}." if owner else "")]
        kinds = {towers[p] for p in inside if p in towers}
        holds_text = any(towers.keys().isdisjoint([p, *parents_of(p)]) for p in inside)
        beside = tower == TOKENS and owner is not None and owner != path and module is not output
        embeds_text = owner is not None and any(isinstance(child, nn.Embedding) for child in models[owner].children())
        if beside and kinds and (holds_text or not embeds_text):
            tower = FRAMES if FRAMES in kinds and (PATCHES not in kinds or "audio" in path.lower()) else PATCHES
        elif beside and holds_text and _MEDIA.search(path.removeprefix(f"{owner}.")):
            tower = FRAMES if "audio" in path.lower() else PATCHES
        elif tower == TOKENS:
            inner = around if owner is None else around[: around.index(owner)]
            tower = _beside_towers(inner, models, towers)
        yield path, tower


def _beside_towers(paths: Sequence[str], models: dict[str, Any], towers: dict[str, str | None]) -> str | None:
    """The kind of the towers in the innermost module around the first of `paths` that holds models; TOKENS for several
    kinds, or models of the text."""
    held = ([model for model in models if model.startswith(f"{path}.")] for path in paths)
    holder, inside = next(((number, found) for number, found in enumerate(held) if found), (0, []))
    kinds = {next((towers[p] for p in (model, *parents_of(model)) if p in towers), TOKENS) for model in inside}
    return kinds.pop() if holder > 0 and len(kinds) == 1 else TOKENS


def is_model(module: Any) -> bool:
    return hasattr(module, "get_input_embeddings") and hasattr(module.__dict__.get("config"), "get_text_config")


def _tower(path: str, module: Any, models: dict[str, Any]) -> str | None:
    root = next((models[p] for p in [*parents_of(path)][::-1] if p in models), module)
    text = {type(root.config.get_text_config()), type(root.config)}
    inside = (models[p] for p in models if p.startswith(f"{path}." if path else "") and p != path)
    if type(module.config) in text or any(type(m.config) in text for m in inside):
        return TOKENS
    configs = (getattr(m.config, name, None) for m in models.values() if hasattr(m, METHOD) for name in AUDIO_CONFIGS)
    if type(module.config) in map(type, configs):
        return FRAMES
    modalities = (
        module.input_modalities if isinstance(module.input_modalities, str) else " ".join(module.input_modalities)
    )
    names = f"{modalities if 'text' not in modalities else ''} {type(module.config).__name__}".lower()
    return FRAMES if "audio" in names else PATCHES


def parent_of(path: str) -> str:
    return path.rpartition(".")[0]


def parents_of(path: str) -> Iterator[str]:
    """The modules around a module, the innermost first."""
    while path:
        path = parent_of(path)
        yield path
