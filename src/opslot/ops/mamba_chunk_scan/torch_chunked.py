"""The reference as a kernel."""

from __future__ import annotations

from torch import Tensor

from opslot.ops._common.by_document import outside_graphs
from opslot.ops._common.contract import takes
from opslot.ops.mamba_chunk_scan.op import Scan, reference

_packed = outside_graphs("torch_chunked reads the lengths of packed documents")(reference)


@takes(Scan)
def mamba_chunk_scan(given: Scan) -> Tensor | tuple[Tensor, Tensor]:
    """`op.reference`."""
    return reference(*given) if given.cu_seqlens is None else _packed(*given)
