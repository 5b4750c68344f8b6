"""Static sizes of a model around a slot, read from its Transformers config."""

from __future__ import annotations

from typing import Any

from opslot.slots import KernelRequest


def sizes_of(source: Any, **names: str) -> dict[str, int] | None:
    """Sizes by name, from attributes of a config or module; None unless it has all of them."""
    found = {key: getattr(source, name, None) for key, name in names.items()}
    sizes = {key: size for key, size in found.items() if isinstance(size, int) and size}
    return sizes if len(sizes) == len(names) else None


def text_config(request: KernelRequest) -> Any:
    """The config of the language model, or of one of its layers where those differ; None without a config."""
    return layer_config(language_config(request.config), getattr(request.module, "layer_idx", None) or 0)


def language_config(config: Any) -> Any:
    """The config of the language model in `config`, which may be any object or None."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def layer_config(config: Any, index: int) -> Any:
    """The config of a layer of a model whose layers differ, such as Gemma 4's; `config` of others.

    An encoder of images may have more layers than the language model.
    """
    has_own = getattr(config, "is_heterogeneous", False) and index < len(config.per_layer_config)
    return config.per_layer_config[index] if has_own else config


def activation_width(request: KernelRequest, *projections: str) -> dict[str, int] | None:
    """Width of the input of the first of the `projections` that an MLP has; None if it has none."""
    widths = (getattr(getattr(request.module, name, None), "in_features", None) for name in projections)
    width = next((width for width in widths if width is not None), None)
    return None if width is None else {"width": width}


def head_sizes(request: KernelRequest) -> dict[str, int] | None:
    """Query heads, key/value heads and channels of a head; None if the config does not have them."""
    return config_head_sizes(text_config(request))


def config_head_sizes(config: Any) -> dict[str, int] | None:
    """As `head_sizes`, of a config."""
    heads = getattr(config, "num_attention_heads", None)
    if not heads:
        return None
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return {"heads": heads, "kv_heads": kv_heads, "head_dim": width}


def latent_head_sizes(request: KernelRequest) -> dict[str, int] | None:
    """Heads of latent attention, and their channels without and with positions and of values; None if unknown."""
    names = {"heads": "num_attention_heads", "nope": "qk_nope_head_dim", "rope": "qk_rope_head_dim", "v": "v_head_dim"}
    return sizes_of(text_config(request), **names)


def partly_rotated_head_sizes(request: KernelRequest) -> dict[str, int] | None:
    """Query heads, and their channels without and with positions, where a config has the size of a whole head."""
    sizes = sizes_of(text_config(request), heads="num_attention_heads", nope="head_dim", rope="qk_rope_head_dim")
    return None if sizes is None else {**sizes, "nope": sizes["nope"] - sizes["rope"]}
