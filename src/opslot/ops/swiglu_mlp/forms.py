"""Transformers code that swiglu_mlp replaces: act(gate) * up of an MLP. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from opslot.patchgen import Slot
from opslot.patchgen.forms import Match, ModuleView, Skip


@dataclass(frozen=True)
class GatedMLP:
    """An MLP by patterns.

    Attributes:
        whole: the code that its forward must contain.
        gated: the expression in it that the slot replaces.
        seen: architectures that have it.
    """

    whole: str
    gated: str
    seen: str

    def matches(self, module: ModuleView, forward: str) -> bool:
        return module.count(forward, self.whole) == module.count(forward, self.gated) == 1


_ROWS = (
    GatedMLP(
        "self.down_proj(self.act_fn(self.gate_proj($x)) * self.up_proj($y))",
        "self.act_fn($gate) * $up",
        "llama, qwen2, qwen3, mistral, gemma and most decoders",
    ),
    GatedMLP(
        "$gate, $up = $both.chunk(2, dim=-1)\n$gated = $up * self.activation_fn($gate)",
        "$up * self.activation_fn($gate)",
        "phi3, glm, glm4",
    ),
)


@dataclass(frozen=True)
class GatedMLPs:
    """down_proj(act(gate) * up), gate and up from two projections or as halves of one."""

    rows: tuple[GatedMLP, ...]

    def find(self, module: ModuleView) -> Iterator[Match | Skip]:
        for name, forward in module.methods():
            text = module.text(forward)
            # Parsing takes most of the time.
            row = next((row for row in self.rows if "down_proj" in text and row.matches(module, forward)), None)
            if row is not None:
                yield self._match(name, forward, row.gated)
            elif name.endswith("MLP") and "act" in text:
                yield Skip(name, "swiglu_mlp", "computes something else than down_proj(act(gate) * up)")

    @staticmethod
    def _match(name: str, forward: str, gated: str) -> Match:
        slot = Slot("swiglu_mlp", "standard")
        return Match(
            name,
            slot.op,
            slot.variant,
            lambda patch: patch.slot_expr(forward, slot, gated, args="$gate, $up"),
        )


FORMS = (GatedMLPs(_ROWS),)
