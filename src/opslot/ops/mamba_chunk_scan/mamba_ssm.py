"""The chunked scan of the package mamba_ssm."""

from __future__ import annotations

import torch
from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined
from torch import Tensor

from opslot.ops._common.arguments import reject
from opslot.ops._common.contract import takes
from opslot.ops._common.documents import document_of_tokens
from opslot.ops.mamba_chunk_scan.op import OPTIONS, Scan

_LABEL = "mamba_chunk_scan_implementation='mamba_ssm'"
# What the package's own modules and Transformers' configs use.
_CHUNK = 256


@takes(Scan)
def mamba_chunk_scan(scan: Scan) -> Tensor | tuple[Tensor, Tensor]:
    """`op.reference`, with `cu_seqlens` without states."""
    scan.check(_LABEL)
    seq_idx = None
    x, dt, A, B, C, *_, cu_seqlens = scan.in_one_row()
    if cu_seqlens is not None:
        if scan.initial_states is not None or scan.return_final_states:
            reject(_LABEL, "cu_seqlens", "states of packed documents", "use triton")
        seq_idx = document_of_tokens(cu_seqlens, 1, x.shape[1], x.device).to(torch.int32)
    found = mamba_chunk_scan_combined(
        x,
        dt,
        A,
        B,
        C,
        chunk_size=_CHUNK,
        seq_idx=seq_idx,
        **{name: getattr(scan, name) for name in OPTIONS},
        initial_states=scan.initial_states,
    )
    return found if scan.return_final_states else found.view(scan.x.shape)
