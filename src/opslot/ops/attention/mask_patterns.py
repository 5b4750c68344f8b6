"""Reads the functions of (batch, head, query, key) with which Transformers calls an implementation's mask function."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from transformers import masking_utils

_MODULE = masking_utils.__name__


class MaskPattern(NamedTuple):
    """What a mask function hides; `documents` int [B, S] are ids of the documents of a row."""

    causal: bool | None = None
    window: int | None = None
    chunk: int | None = None
    documents: Tensor | None = None


BIDIRECTIONAL = MaskPattern(causal=False)


def _read(function: Any) -> MaskPattern | None:
    """The pattern of one of Transformers' mask functions; None for any other function."""
    if getattr(function, "__module__", None) != _MODULE:
        return None
    name = function.__qualname__
    if name == "causal_mask_function":
        return MaskPattern(causal=True)
    if name == "bidirectional_mask_function":
        return MaskPattern(causal=False)
    cells = _cells(function)
    match name.partition(".")[0]:
        case "sliding_window_overlay":
            return MaskPattern(window=cells["sliding_window"])
        case "chunked_overlay":
            return MaskPattern(chunk=cells["chunk_size"])
        case "packed_sequence_mask_function":
            return MaskPattern(documents=cells["packed_sequence_mask"])
        case "remap_positions_for_packed_sequence":
            return _read(cells["mask_function"])
        case "and_masks":
            return _merged([_read(part) for part in cells["mask_functions"]])
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
    """The pattern of a whole mask; None where it cannot be read."""
    pattern = _read(mask_function)
    return None if pattern is None or pattern.causal is None else pattern


def _merged(parts: list[MaskPattern | None]) -> MaskPattern | None:
    """Both of two patterns; None if their combination is not a pattern."""
    found = MaskPattern()
    for part in parts:
        given = {} if part is None else {name: value for name, value in part._asdict().items() if value is not None}
        if part is None or any(getattr(found, name) is not None for name in given):
            return None
        found = found._replace(**given)
    return found
