"""Transformers' recurrences. No caller is reviewed yet, so all are skipped. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from opslot.patchgen.forms import Match, ModuleView, Skip, skip_callers

_GATED_DELTA_RULE = r"(torch_)?(chunk|recurrent)_gated_delta_rule"
# Kimi's delta attention, Mamba's and Mamba-2's selective scans, RWKV's linear attention.
_OTHERS = r"(torch_)?(chunk|recurrent)_kimi_delta_attention|mamba\w*(scan\w*|inner_fn|state_update)|rwkv_linear_\w+"


@dataclass(frozen=True)
class Recurrences:
    """Classes that call a recurrence over the sequence."""

    pattern: str
    reason: str

    def find(self, module: ModuleView) -> Iterator[Match | Skip]:
        yield from skip_callers(module, "chunk_gated_delta_rule", self.pattern, self.reason)


FORMS = (
    Recurrences(_GATED_DELTA_RULE, "calls {function}, and no caller of it is among the reviewed forms"),
    Recurrences(_OTHERS, "calls {function}, another recurrence than the gated delta rule"),
)
