"""flash-linear-attention's chunked gated delta rule, and Kimi delta attention for the variant per_channel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from fla.ops.gated_delta_rule import chunk_gated_delta_rule as fla_chunk
from torch import Tensor

from opslot.ops._common.arguments import reject
from opslot.ops._common.contract import takes
from opslot.ops.chunk_gated_delta_rule.op import WIDEST_KEY, DeltaRule

_LABEL = "chunk_gated_delta_rule_implementation='fla'"


@takes(DeltaRule)
def chunk_gated_delta_rule(given: DeltaRule) -> tuple[Tensor, Tensor | None]:
    """`op.reference` for bfloat16 and keys up to 256 wide.

    The first call with new widths, heads or dtype tunes fla's kernels, minutes of compiling that fla keeps on disk.
    """
    query, key, value, g, *_ = given
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dtype != torch.bfloat16:
            reject(_LABEL, name, f"its dtype is {tensor.dtype}, not bfloat16", "use torch_chunked")
    if key.shape[3] > WIDEST_KEY:
        reject(_LABEL, "key", f"its heads are {key.shape[3]} wide, the limit is {WIDEST_KEY}", "use torch_chunked")
    given.check(_LABEL)
    options = given.library_options
    if given.cu_seqlens is not None:
        options["cu_seqlens"] = given.cu_seqlens.to(torch.int64)
    out, final = _function_of(g)(*given.in_one_row()[:5], **options)
    return out.view(value.shape), final


def _function_of(g: Tensor) -> Callable[..., Any]:
    """fla's function for the decays of heads or of channels."""
    if g.dim() < 4:
        return fla_chunk
    from fla.ops.kda import chunk_kda

    return chunk_kda
