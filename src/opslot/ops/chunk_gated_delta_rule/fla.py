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
from opslot.slots import Requirement

_LABEL = "chunk_gated_delta_rule_implementation='fla'"
# fla's own grouping of heads reads each key once; releases before 0.6 were not tested with it.
_GROUPS_HEADS = Requirement("fla", "fla-core", ">=0.6").unsupported() is None


@takes(DeltaRule)
def chunk_gated_delta_rule(given: DeltaRule) -> tuple[Tensor, Tensor | None]:
    """`op.reference` for bfloat16 and keys up to 256 wide.

    The first call with new widths, heads or dtype tunes fla's kernels, minutes of compiling that fla keeps on disk.
    """
    query, key, value, g, beta, initial_state, want_state, normalize, cu_seqlens = given
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dtype != torch.bfloat16:
            reject(_LABEL, name, f"its dtype is {tensor.dtype}, not bfloat16", "use torch_chunked")
    if key.shape[3] > WIDEST_KEY:
        reject(_LABEL, "key", f"its heads are {key.shape[3]} wide, the limit is {WIDEST_KEY}", "use torch_chunked")
    given.check(_LABEL)
    shape, groups = value.shape, value.shape[2] // key.shape[2]
    query, key, value, g, beta = given.in_one_row
    if groups > 1 and not _GROUPS_HEADS:
        query, key = query.repeat_interleave(groups, 2), key.repeat_interleave(groups, 2)
    out, final = _function_of(g)(
        query,
        key,
        value,
        g,
        beta,
        # Kimi delta attention asserts the dtype.
        initial_state=None if initial_state is None else initial_state.float(),
        output_final_state=want_state,
        use_qk_l2norm_in_kernel=normalize,
        cu_seqlens=None if cu_seqlens is None else cu_seqlens.to(torch.int64),
    )
    return out.view(shape), final


def _function_of(g: Tensor) -> Callable[..., Any]:
    """fla's function for the decays of heads or of channels."""
    if g.dim() < 4:
        return fla_chunk
    from fla.ops.kda import chunk_kda

    return chunk_kda
