"""Names of torch dtypes in configurations and messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from opslot._base.errors import ConfigError

if TYPE_CHECKING:
    import torch


def dtype_name(dtype: torch.dtype) -> str:
    """E.g. "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def floating_dtype(value: torch.dtype | str, asked: str) -> torch.dtype:
    """`value`, a dtype or its name with or without "torch.", as a dtype.

    Raises:
        ConfigError: it is not a floating dtype; the message begins with `asked`.
    """
    import torch

    found = getattr(torch, value.removeprefix("torch."), None) if isinstance(value, str) else value
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ConfigError(f"{asked} is not a floating dtype", hint="use bfloat16, float16 or float32")
    return found
