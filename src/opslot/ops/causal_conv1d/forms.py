"""Transformers' causal convolutions. No caller is reviewed yet, so all are skipped. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from opslot.patchgen.forms import Match, ModuleView, Skip, skip_callers


@dataclass(frozen=True)
class Convolutions:
    """Classes that convolve causally over the sequence."""

    def find(self, module: ModuleView) -> Iterator[Match | Skip]:
        reason = "calls {function}, and no caller of it is among the reviewed forms"
        yield from skip_callers(module, "causal_conv1d", "(torch_)?causal_conv1d(_fn|_update)?", reason)


FORMS = (Convolutions(),)
