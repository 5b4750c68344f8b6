"""Transformers code that linear_fp32 replaces: F.linear of hidden states and a weight that are cast to float32.

Does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product

from opslot.patchgen import PatchConfig, Slot
from opslot.patchgen.forms import Match, ModuleView

_SLOT = Slot("linear_fp32", "standard")
_CASTS = ("type(torch.float32)", "to(torch.float32)", "float()")
_PATTERNS = tuple(
    f"{linear}($x.{cast}, $weight.{cast})" for linear, cast in product(("F.linear", "nn.functional.linear"), _CASTS)
)


@dataclass(frozen=True)
class LinearsInFloat32:
    """Calls of F.linear without a bias in a forward method."""

    def find(self, module: ModuleView) -> Iterator[Match]:
        for name, forward in module.methods():
            if "linear(" not in module.text(forward):
                continue
            found = {pattern: count for pattern in _PATTERNS if (count := module.count(forward, pattern))}
            if found:
                yield Match(name, _SLOT.op, _SLOT.variant, partial(_write, forward, found))


def _write(method: str, found: dict[str, int], patch: PatchConfig) -> None:
    """Route the calls of a method through the slot; `found` counts them by pattern."""
    for pattern, count in found.items():
        patch.slot_expr(method, _SLOT, pattern, args="$x, $weight", count=count)


FORMS = (LinearsInFloat32(),)
