"""Memory traffic that several ops have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from opslot.slots import Cost


def elementwise_cost(name: str) -> Callable[[Mapping[str, Any]], Cost]:
    """Of an op from the argument `name` to a result of its size.

    Forward reads the argument and writes the result; backward reads the argument and the result's gradient and writes
    the argument's gradient.
    """

    def cost(arguments: Mapping[str, Any]) -> Cost:
        x = arguments[name]
        return Cost(bytes=5 * x.numel() * x.element_size())

    return cost
