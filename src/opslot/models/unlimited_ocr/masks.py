"""The mask of Unlimited-OCR's reference sliding windows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from opslot.ops._common.documents import has_cache


def reference_window_mask(causal: Callable[..., Any], windowed: Callable[..., Any], **arguments: Any) -> Any:
    """The causal mask without a cache, else Transformers' own, from its functions and their arguments."""
    if has_cache(arguments):
        return windowed(**arguments)
    # Dense, as Transformers' own, where no kernel replaces it.
    return causal(**arguments, allow_is_causal_skip=False)
