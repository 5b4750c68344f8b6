"""The reference as a kernel."""

from __future__ import annotations

from torch import Tensor

from opslot.ops._common.by_document import outside_graphs
from opslot.ops._common.contract import takes
from opslot.ops.chunk_gated_delta_rule.op import DeltaRule, reference

_packed = outside_graphs("torch_chunked reads the lengths of packed documents")(reference)


@takes(DeltaRule)
def chunk_gated_delta_rule(given: DeltaRule) -> tuple[Tensor, Tensor | None]:
    """`op.reference`."""
    return reference(*given) if given.cu_seqlens is None else _packed(*given)
