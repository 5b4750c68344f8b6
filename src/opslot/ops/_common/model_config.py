"""Static sizes of a model around a slot, read from its Transformers config."""

from __future__ import annotations

from typing import Any

from opslot.slots import KernelRequest


def text_config(request: KernelRequest) -> Any:
    """The config of the language model; None without a config."""
    return language_config(request.config)


def language_config(config: Any) -> Any:
    """The config of the language model in `config`, which may be any object or None."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


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
    config = text_config(request)
    names = {"heads": "num_attention_heads", "nope": "qk_nope_head_dim", "rope": "qk_rope_head_dim", "v": "v_head_dim"}
    sizes = {key: getattr(config, name, None) for key, name in names.items()}
    return {key: size for key, size in sizes.items() if size} if all(sizes.values()) else None


def partly_rotated_head_sizes(request: KernelRequest) -> dict[str, int] | None:
    """Query heads, and their channels without and with positions, where a config has the size of a whole head."""
    config = text_config(request)
    heads, width, rope = (
        getattr(config, name, None) for name in ("num_attention_heads", "head_dim", "qk_rope_head_dim")
    )
    return {"heads": heads, "nope": width - rope, "rope": rope} if heads and width and rope else None
