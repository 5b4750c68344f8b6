"""Reads the functions of (batch, head, query, key) with which Transformers calls an implementation's mask function."""

from __future__ import annotations

import dis
from typing import Any, NamedTuple

from torch import Tensor
from transformers import masking_utils

_MODULE = masking_utils.__name__


class MaskPattern(NamedTuple):
    """What a mask function hides.

    Attributes:
        causal: whether it hides later keys; None for a part of a mask, which leaves that open.
        window: number of keys that a query sees up to its own; without causality, it sees `window - 1` after it too.
        reach: highest distance of a key to either side, of a part of a mask.
        chunk: keys are visible to queries of the same chunk.
        documents: int [B, S], ids of the documents of a row.
    """

    causal: bool | None = None
    window: int | None = None
    reach: int | None = None
    chunk: int | None = None
    documents: Tensor | None = None


BIDIRECTIONAL = MaskPattern(causal=False)


def _read(function: Any) -> MaskPattern | None:
    """The pattern of one of Transformers' mask functions; None for any other function."""
    name = getattr(function, "__qualname__", "")
    if getattr(function, "__module__", None) != _MODULE:
        return _read_of_model(function, name)
    if name == "causal_mask_function":
        return MaskPattern(causal=True)
    if name == "bidirectional_mask_function":
        return MaskPattern(causal=False)
    cells = _cells(function)
    match name.partition(".")[0]:
        case "sliding_window_overlay":
            return MaskPattern(window=cells["sliding_window"])
        case "sliding_window_bidirectional_overlay":
            return MaskPattern(reach=cells["sliding_window"])
        case "chunked_overlay":
            return MaskPattern(chunk=cells["chunk_size"])
        case "packed_sequence_mask_function":
            return MaskPattern(documents=cells["packed_sequence_mask"])
        case "remap_positions_for_packed_sequence":
            return _read(cells["mask_function"])
        case "and_masks":
            return _merged([_read(part) for part in cells["mask_functions"]])
        case "or_masks":
            return _union([_read(part) for part in cells["mask_functions"]])
    return None


def _read_of_model(function: Any, name: str) -> MaskPattern | None:
    """The pattern of the functions with which Gemma 3, and models derived from it, become bidirectional."""
    if name.startswith("_bidirectional_window_overlay."):
        window = _cells(function)["sliding_window"]
        return MaskPattern(reach=window if function(0, 0, 0, window) else window - 1)
    if name.endswith("<lambda>") and not function.__closure__:
        # Without a read of its arguments, here or in a function inside, it returns the same for all keys.
        reads = any(i.opname.startswith("LOAD_FAST") for i in dis.get_instructions(function))
        reads = reads or bool(function.__code__.co_cellvars)
        return BIDIRECTIONAL if not reads and bool(function(0, 0, 0, 0)) else None
    return None


def _cells(function: Any) -> dict[str, Any]:
    """The variables of a closure."""
    contents = (cell.cell_contents for cell in function.__closure__ or ())
    return dict(zip(function.__code__.co_freevars, contents, strict=True))


def by_index(function: Any) -> Any:
    """A mask function of packed documents that gets indices of tokens in the row, not positions in their documents.

    Transformers passes positions to all parts of a mask, also to those that look up what a token is, such as the image
    that it belongs to. Without chunks, the other parts depend on differences of positions alone.
    """
    if getattr(function, "__module__", None) != _MODULE:
        return function
    name = function.__qualname__.partition(".")[0]
    if name in ("and_masks", "or_masks"):
        return getattr(masking_utils, name)(*map(by_index, _cells(function)["mask_functions"]))
    if name == "remap_positions_for_packed_sequence" and not _has_chunks(inner := _cells(function)["mask_function"]):
        return inner
    return function


def _has_chunks(function: Any) -> bool:
    if getattr(function, "__module__", None) != _MODULE:
        return False
    parts = _cells(function).get("mask_functions", ()) if function.__closure__ else ()
    return function.__qualname__.startswith("chunked_overlay") or any(map(_has_chunks, parts))


def pattern_of(mask_function: Any) -> MaskPattern | None:
    """The pattern of a whole mask, without `reach`; None where it cannot be read."""
    pattern = _read(mask_function)
    if pattern is None or pattern.causal is None:
        return None
    if pattern.reach is None:
        # Transformers has no mask without causality whose window limits one side only.
        return None if pattern.window is not None and not pattern.causal else pattern
    return None if pattern.window is not None else pattern._replace(window=pattern.reach + 1, reach=None)


def _merged(parts: list[MaskPattern | None]) -> MaskPattern | None:
    """Both of two patterns; None if their combination is not a pattern."""
    found = MaskPattern()
    for part in parts:
        given = {} if part is None else {name: value for name, value in part._asdict().items() if value is not None}
        if part is None or any(getattr(found, name) is not None for name in given):
            return None
        found = found._replace(**given)
    return found


def _union(parts: list[MaskPattern | None]) -> MaskPattern | None:
    """What one of two parts lets a query see, if one lets it see all that the other does; else None."""
    if len(parts) != 2:
        return None
    first, second = parts
    if first is None or second is None:
        return None
    if _covers(first, second):
        return first._replace(causal=False)
    return second._replace(causal=False) if _covers(second, first) else None


def _covers(wide: MaskPattern, other: MaskPattern) -> bool:
    """Whether `wide` hides nothing but keys out of its reach, and `other` is causal and has no window beyond that."""
    limits = wide.window, wide.chunk, wide.documents
    if wide.causal or any(limit is not None for limit in limits):
        return False
    return wide.reach is None or bool(other.causal and other.window is not None and other.window <= wide.reach + 1)
