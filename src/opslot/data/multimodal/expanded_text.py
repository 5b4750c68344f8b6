"""Where parts of a text are after a processor expanded its placeholders."""

from __future__ import annotations

import re
from collections.abc import Sequence

from opslot.data.encoder import SampleError


def moved_spans(
    text: str, expanded: str, spans: list[tuple[int, int]], placeholders: Sequence[str]
) -> list[tuple[int, int]]:
    """`spans` of `text` in `expanded`, where each run of placeholders is replaced.

    Raises:
        SampleError: the texts differ elsewhere.
    """
    # Without placeholders, a pattern that matches nothing.
    replaced = re.compile("|".join(map(re.escape, placeholders)) or "(?!)")
    edges = [0, *(edge for match in replaced.finditer(text) for edge in match.span()), len(text)]
    kept = [(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True) if start < stop]
    moved: list[tuple[int, int, int]] = []
    position = 0
    for number, (start, stop) in enumerate(kept):
        piece = text[start:stop]
        last = number == len(kept) - 1 and stop == len(text)
        at = expanded.rfind(piece) if last else expanded.find(piece, position)
        if at < position or not expanded.startswith(piece, at) or (start == 0 and at):
            raise SampleError("the processor changes the text besides placeholders, so its labels are unknown")
        moved.append((start, stop, at))
        position = at + len(piece)
    found = []
    for begin, end in spans:
        for start, stop, at in moved:
            low, high = max(begin, start), min(end, stop)
            if low < high:
                found.append((low - start + at, high - start + at))
    return found
