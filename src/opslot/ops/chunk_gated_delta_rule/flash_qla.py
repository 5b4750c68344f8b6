"""FlashQLA's chunked gated delta rule, in TileLang."""

from __future__ import annotations

import torch
from flash_qla import chunk_gated_delta_rule as flash_qla_chunk
from torch import Tensor

from opslot.ops._common.arguments import reject
from opslot.ops._common.contract import takes
from opslot.ops.chunk_gated_delta_rule.op import FLASH_QLA_WIDTH, DeltaRule

LABEL = "chunk_gated_delta_rule_implementation='flash_qla'"


@takes(DeltaRule)
def chunk_gated_delta_rule(given: DeltaRule) -> tuple[Tensor, Tensor | None]:
    """`op.reference` for bfloat16 and float16, keys and values of 128. The first call compiles for a minute or two."""
    query, key, value, _, _, initial_state, want_state, normalize, cu_seqlens = given
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dtype not in (torch.bfloat16, torch.float16) or tensor.dtype != query.dtype:
            reject(LABEL, name, f"its dtype is {tensor.dtype}, not bfloat16 or float16", "use triton")
        if tensor.shape[3] != FLASH_QLA_WIDTH:
            reject(LABEL, name, f"its heads are {tensor.shape[3]} wide, not {FLASH_QLA_WIDTH}", "use triton")
    given.check(LABEL)
    query, key, values, g, beta = given.in_one_row
    out, final = flash_qla_chunk(
        query,
        key,
        values,
        g,
        beta,
        initial_state=None if initial_state is None else initial_state.float(),
        output_final_state=want_state,
        use_qk_l2norm_in_kernel=normalize,
        cu_seqlens=None if cu_seqlens is None else cu_seqlens.to(torch.int64),
    )
    return out.view(value.shape), final
