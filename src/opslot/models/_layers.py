"""Another number of layers for a model's config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def with_layers(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """The fields of `config` (plain data) to change for a model whose language model has `layers` layers.

    Lists with one entry a layer (`layer_types`, `num_attention_heads_per_layer`), which Transformers compares with the
    number of layers, are cut or repeated, and what belongs to further layers in mappings by layer is left out.
    """
    for part in ("thinker_config", "text_config"):
        if isinstance(config.get(part), Mapping):
            return {part: {**config[part], **with_layers(config[part], layers)}}
    before = config.get("num_hidden_layers")
    changes: dict[str, Any] = {"num_hidden_layers": layers}
    for name, value in config.items():
        if isinstance(value, list) and value:
            # Short lists may have as many entries by chance, such as `eos_token_id`.
            one_a_layer = len(value) == before and ("layer" in name or len(value) > 4)
            if one_a_layer or name.endswith("layer_types"):
                changes[name] = [value[i % len(value)] for i in range(layers)]
        elif isinstance(value, Mapping) and "layer" in name and all(str(key).isdigit() for key in value):
            changes[name] = {key: of_layer for key, of_layer in value.items() if int(key) < layers}
    return changes
