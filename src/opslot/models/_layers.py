"""Another number of layers for a model's config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def with_layers(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """The fields of `config` (plain data) to change for a model whose language model has `layers` layers.

    Lists with one entry a layer (`layer_types`, `mlp_layer_types`), which Transformers writes into every saved config
    and compares with the number of layers, are cut or repeated.
    """
    for part in ("thinker_config", "text_config"):
        if isinstance(config.get(part), Mapping):
            return {part: {**config[part], **with_layers(config[part], layers)}}
    changes: dict[str, Any] = {"num_hidden_layers": layers}
    for name, value in config.items():
        if name.endswith("layer_types") and isinstance(value, list) and value:
            changes[name] = [value[i % len(value)] for i in range(layers)]
    return changes
