"""What the attention of a sub-model takes: read from its modules when a kernel is bound."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from opslot.ops._common.model_config import config_head_sizes, head_sizes, text_config
from opslot.slots import KernelRequest
from opslot.slots.protocol import attention_options

# Causal windows up to which `triton` is faster than FlashAttention 4, whatever the length.
NARROW_WINDOW = 256


class AttentionOptions(NamedTuple):
    """What a kernel must serve to replace the attention of a sub-model.

    Attributes:
        widths: head sizes of queries and keys, and of values, in any layer.
        grouped: whether several query heads share a key/value head in any layer.
        windows: sliding windows, in tokens.
        chunk: size of chunked local attention, in tokens.
        softcap: cap of the scores.
        sinks: whether any layer has attention sinks.
        dropout: the highest dropout of any layer in training.
    """

    widths: frozenset[tuple[int, int]] = frozenset()
    grouped: bool = False
    windows: frozenset[int] = frozenset()
    chunk: int | None = None
    softcap: float | None = None
    sinks: bool = False
    dropout: float = 0.0


def attention_modules(model: Any) -> Iterator[Any]:
    """The modules of `model` whose attention is selected through its own config."""
    config = model.__dict__.get("config")
    for module in model.modules() if config is not None else ():
        if module is not model and module.__dict__.get("config") is config and attention_options(module) is not None:
            yield module


def options_of(request: KernelRequest) -> AttentionOptions:
    """The options of the sub-model of `request`."""
    modules = [] if request.module is None else list(attention_modules(request.module))
    config = text_config(request)
    dropout = getattr(config, "attention_dropout", 0.0)
    found = AttentionOptions(chunk=getattr(config, "attention_chunk_size", None))
    for module in modules:
        window, softcap, sinks = (option_value(module, name) for name in ("sliding_window", "softcap", "s_aux"))
        own = option_value(module, "dropout")
        own = getattr(own, "p", dropout if own is None else own)
        found = found._replace(
            widths=found.widths | {head_widths(module, text_config(request))},
            grouped=found.grouped or getattr(module, "num_key_value_groups", 1) != 1,
            windows=found.windows | ({window} if window is not None else set()),
            softcap=softcap if softcap is not None else found.softcap,
            sinks=found.sinks or sinks is not None,
            dropout=max(found.dropout, own if isinstance(own, float | int) else 0.0),
        )
    if modules:
        return found
    sizes = head_sizes(request)
    if sizes is not None:
        widths = frozenset({(sizes["head_dim"], sizes["head_dim"])})
        found = found._replace(widths=widths, grouped=sizes["heads"] != sizes["kv_heads"])
    return found._replace(dropout=dropout or 0.0)


def option_value(module: Any, name: str) -> Any:
    """The value that a module passes to attention as option `name`; None if it has none."""
    _, attributes = attention_options(module) or ("", {})
    if name not in attributes:
        return None
    # Configs whose layers differ raise for what differs, which their modules have.
    return getattr(module if hasattr(module, attributes[name]) else module.config, attributes[name], None)


def head_widths(module: Any, config: Any) -> tuple[int, int]:
    """Head sizes of queries and keys, and of values; 0 where neither the module nor its `config` has them."""
    names = ("qk_head_dim", "head_dim", "head_size", "attention_head_size")
    width = next((getattr(module, name) for name in names if isinstance(getattr(module, name, None), int)), None)
    if width is None:
        sizes = config_head_sizes(config)
        width = sizes["head_dim"] if sizes else 0
    values = getattr(module, "v_head_dim", None)
    return width, values if isinstance(values, int) else width
