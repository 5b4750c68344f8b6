"""Transformers code that load_balancing_loss replaces. Does not import torch."""

from __future__ import annotations

from opslot.patchgen.forms import FunctionForms, Reviewed

_LOSS = "Switch Transformer's auxiliary loss over all layers"

FORMS = (
    FunctionForms(
        op="load_balancing_loss",
        function="load_balancing_loss_func",
        rows=(
            Reviewed("c0ad95f69738", "standard", _LOSS, "qwen3_moe, mixtral and 23 more, before 5.16"),
            Reviewed("e8f309a98210", "standard", f"{_LOSS}, accumulated per layer in fp32", "the same, 5.16 to 5.22"),
            Reviewed("6d1c7fe46791", "standard", f"{_LOSS}, counted with histc", "the same and 5 more, from 5.23"),
        ),
        reason="computes another loss than the reviewed forms",
    ),
)
