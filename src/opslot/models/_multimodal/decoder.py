"""The language model in a module that computes features of images, videos or audio."""

from __future__ import annotations

from typing import Any


def decoder_in(holder: Any) -> Any:
    """What `get_decoder` returns; its child `model` where that is `holder` itself and has such a child.

    In Transformers 5.9 it is for the thinkers of Qwen Omni models, whose base model has the prefix "thinker".
    """
    found = holder.get_decoder()
    inner = getattr(holder, "model", None)
    return inner if found is holder and hasattr(inner, "get_decoder") else found


def reader_in(holder: Any) -> Any:
    """The module that reads the features: the text encoder of an encoder-decoder, else the language model."""
    return holder.get_encoder() if getattr(holder.config, "is_encoder_decoder", False) else decoder_in(holder)
