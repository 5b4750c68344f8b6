"""Head sizes that FlashAttention's kernels compute correctly; others are padded with zeros to the next of these."""

from __future__ import annotations

import torch

# (queries and keys, values) for FlashAttention 4, measured on an H200: correct outputs and gradients, causal, with
# window and softcap. Others (40, 48, 72, 80, 112) give wrong gradients or do not compile.
_FLASH_4 = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
_FLASH_4_GROUPED = tuple(size for size in _FLASH_4 if 192 not in size)
_LIMIT = 256


def padded_widths(version: int, width: int, value_width: int, *, grouped: bool = False) -> tuple[int, int] | None:
    """The head sizes that FlashAttention `version` computes with, or None if there are none that wide.

    Args:
        grouped: several query heads share a key/value head, for which version 4's backward has no kernels of 192.
    """
    if version == 4:
        sizes = _FLASH_4_GROUPED if grouped else _FLASH_4
        return next(((q, v) for q, v in sizes if width <= q and value_width <= v), None)
    widest = max(width, value_width)
    return (widest, widest) if widest <= _LIMIT else None


def widest_head(dtype: torch.dtype | None) -> int:
    """The largest head size of `triton`: tiles of larger ones, or of these in float32, exceed the shared memory."""
    return 256 if dtype == torch.float32 else 512
