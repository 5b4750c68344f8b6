"""FlashQLA's chunked gated delta rule: TileLang kernels for keys and values of 128."""

from __future__ import annotations

import torch
from flash_qla import chunk_gated_delta_rule as flash_qla_chunk
from torch import Tensor

from opslot.ops._common.arguments import reject
from opslot.ops._common.contract import takes
from opslot.ops.chunk_gated_delta_rule.op import FLASH_QLA_WIDTH, DeltaRule

_LABEL = "chunk_gated_delta_rule_implementation='flash_qla'"


@takes(DeltaRule)
def chunk_gated_delta_rule(given: DeltaRule) -> tuple[Tensor, Tensor | None]:
    """`op.reference` for bfloat16 and float16, and keys and values of 128.

    The first call with other numbers of heads compiles for minutes; TileLang keeps the kernels on disk.
    """
    query, key, value, *_ = given
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dtype not in (torch.bfloat16, torch.float16):
            reject(_LABEL, name, f"its dtype is {tensor.dtype}, not bfloat16 or float16", "use torch_chunked")
        if tensor.shape[3] != FLASH_QLA_WIDTH:
            found = f"its heads are {tensor.shape[3]} wide, not {FLASH_QLA_WIDTH}"
            reject(_LABEL, name, found, "use triton or torch_chunked")
    given.check(_LABEL)
    *projections, g, beta = given.in_one_row()[:5]
    try:
        # Its backward asserts decays in float32. It reads cu_seqlens on the host once for each tensor: that of a model,
        # which is not converted, once for all layers.
        out, final = flash_qla_chunk(*projections, g.float(), beta, **given.library_options)
    except ValueError as error:
        if "invalid sequence lengths" not in str(error):
            raise
        reject(_LABEL, "cu_seqlens", "a document is empty", "remove empty documents, or use triton")
    return out.view(value.shape), final
