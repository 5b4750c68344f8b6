"""What generated modules call for their delta rules."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from opslot.ops._common.documents import each_document, join_documents


def delta_rule_by_document(
    rule: Callable[..., tuple[Tensor, Tensor | None]],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    output_final_state: bool,
    use_qk_l2norm_in_kernel: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Transformers' gated delta rule `rule`, of each document alone if there are several."""

    def run(*tokens: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        return rule(
            *tokens,
            initial_state=state,
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        )

    tokens = query, key, value, g, beta
    if cu_seqlens is None:
        return run(*tokens, state=initial_state)
    outputs, states = zip(*each_document(run, cu_seqlens, *tokens, state=initial_state), strict=True)
    return join_documents(outputs, value), torch.cat(states) if output_final_state else None
