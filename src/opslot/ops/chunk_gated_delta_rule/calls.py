"""What generated modules call for their delta rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from opslot.ops._common.by_document import each_document, join_documents
from opslot.ops.chunk_gated_delta_rule.op import DeltaRule


def delta_rule_by_document(
    rule: Callable[..., tuple[Tensor, Tensor | None]], *arguments: Any
) -> tuple[Tensor, Tensor | None]:
    """Transformers' gated delta rule `rule` of the op's `arguments`, of each document alone if there are several."""
    *tokens, initial_state, want_state, normalize, cu_seqlens = DeltaRule(*arguments)

    def run(*tokens: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        return rule(*tokens, initial_state=state, output_final_state=want_state, use_qk_l2norm_in_kernel=normalize)

    if cu_seqlens is None:
        return run(*tokens, state=initial_state)
    outputs, states = zip(*each_document(run, cu_seqlens, *tokens, state=initial_state), strict=True)
    return join_documents(outputs, tokens[2]), torch.cat(states) if want_state else None
