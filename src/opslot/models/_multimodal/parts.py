"""The parts of a model by name: which parameters are those of its encoders, merger and language model."""

from __future__ import annotations

import difflib
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from opslot._base.errors import ConfigError
from opslot.models._multimodal.audio import AUDIO_CONFIGS
from opslot.models._multimodal.decoder import decoder_in
from opslot.models._multimodal.modalities import feature_module
from opslot.slots.protocol import trained_model

PARTS = ("vision", "audio", "merger", "language_model")
# Modules inside an encoder that project its features to the language model.
_MERGERS = ("merger", "projector", "aligner", "connector", "resampler")


def parts_of(model: Any) -> dict[str, list[str]]:
    """Names of the parameters of each part; a part that the model lacks is empty.

    An encoder is a module whose config is the model's vision_config or audio_config (or what else a model calls that).
    The language model is its decoder with the output layer. What is between them, and an encoder's own projection, is
    the merger, also where patches have no encoder (Fuyu). A model without images, video and audio has none: a
    classifier's head is in no part.
    """
    config = trained_model(model).config
    names = {"vision_config": "vision", **dict.fromkeys(AUDIO_CONFIGS, "audio")}
    given = {type(own): kind for name, kind in names.items() if (own := getattr(config, name, None)) is not None}
    encoders: dict[str, str] = {}
    for name, module in model.named_modules():
        kind = given.get(type(getattr(module, "config", None)))
        if kind and name and not any(name.startswith(f"{outer}.") for outer in encoders):
            encoders[name] = kind
    own = [_language_model(model), trained_model(model).get_output_embeddings()]
    text = [name for name, module in model.named_modules() if any(module is part for part in own)]
    # Phi-4 multimodal has its encoders inside the decoder, each in a module with its projections.
    around = {outer.rpartition(".")[0] for outer in encoders}
    between = [name for name in around if any(name.startswith(f"{prefix}.") for prefix in text)]
    has_features = bool(encoders) or feature_module(model) is not None
    found: dict[str, list[str]] = {part: [] for part in PARTS}
    for name, _ in model.named_parameters():
        encoder = next((outer for outer in encoders if name.startswith(f"{outer}.")), None)
        if encoder is not None:
            inside = name[len(encoder) :]
            found["merger" if any(word in inside for word in _MERGERS) else encoders[encoder]].append(name)
        elif any(name.startswith(f"{prefix}.") for prefix in between):
            found["merger"].append(name)
        elif any(name.startswith(f"{prefix}.") for prefix in text):
            found["language_model"].append(name)
        elif has_features:
            found["merger"].append(name)
    return found


def select(model: Any, pattern: str, field: str) -> list[str]:
    """Names of the parameters of a part, or of those that match a glob.

    Raises:
        ConfigError: no parameter.
    """
    names = [name for name, _ in model.named_parameters()]
    parts = parts_of(model)
    chosen = (
        parts[pattern]
        if pattern in parts
        else [name for name in names if fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")]
    )
    if not chosen:
        present = [part for part in PARTS if parts[part]]
        near = difflib.get_close_matches(pattern, present, 1)
        raise ConfigError(
            f"{field}: {pattern!r} matches no parameter of {type(model).__name__}"
            + (f" (did you mean {near[0]!r}?)" if near and pattern not in PARTS else ""),
            found=f"the parts {', '.join(present)}",
            hint=f"name a part, or a glob such as {names[0].rpartition('.')[0]}.*",
        )
    return chosen


def freeze(model: nn.Module, patterns: list[str]) -> None:
    """Exclude the parameters of parts from training.

    Raises:
        ConfigError: a pattern without parameters, or nothing left to train.
    """
    parameters = dict(model.named_parameters())
    for pattern in patterns:
        for name in select(model, pattern, "train.freeze"):
            parameters[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise ConfigError(f"train.freeze={patterns} freezes every parameter", hint="remove a part from it")


def _language_model(model: Any) -> Any:
    """The module of the language model, without its output layer."""
    for name in ("language_model", "text_model"):
        found = [module for path, module in model.named_modules() if path.rpartition(".")[2] == name]
        if found:
            return found[0]
    return decoder_in(trained_model(model))
