"""Tensors that wrap others, such as torchao's quantized weights, which only the functions of their class can read."""

from __future__ import annotations

from typing import Any


def wrapper_class(tensor: Any) -> str | None:
    """The class of a tensor that wraps others; None for another tensor, and for a DTensor, whose shard is one."""
    cls = type(tensor)
    if not hasattr(cls, "__tensor_flatten__") or cls.__module__.startswith("torch."):
        return None
    return f"{cls.__module__.partition('.')[0]}.{cls.__name__}"
