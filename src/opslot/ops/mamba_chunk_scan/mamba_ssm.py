"""The chunked scan of the package mamba_ssm."""

from __future__ import annotations

import torch
from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined
from torch import Tensor

from opslot.ops._common.arguments import reject
from opslot.ops._common.documents import one_row
from opslot.ops.mamba_chunk_scan.op import NO_LIMIT, check_shapes

_LABEL = "mamba_chunk_scan_implementation='mamba_ssm'"
# What the package's own modules and Transformers' configs use.
_CHUNK = 256


def mamba_chunk_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = NO_LIMIT,
    return_final_states: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`op.reference`, with `cu_seqlens` without states."""
    check_shapes(_LABEL, x, dt, A, B, C, D, dt_bias, initial_states, cu_seqlens)
    shape, seq_idx = x.shape, None
    if cu_seqlens is not None:
        if initial_states is not None or return_final_states:
            reject(_LABEL, "cu_seqlens", "states of packed documents", "use triton")
        x, dt, B, C = map(one_row, (x, dt, B, C))
        tokens = torch.arange(x.shape[1], device=x.device)
        seq_idx = torch.searchsorted(cu_seqlens[1:].to(torch.int64), tokens, right=True).to(torch.int32)[None]
    found = mamba_chunk_scan_combined(
        x,
        dt,
        A,
        B,
        C,
        chunk_size=_CHUNK,
        D=D,
        dt_bias=dt_bias,
        initial_states=initial_states,
        seq_idx=seq_idx,
        dt_softplus=dt_softplus,
        dt_limit=dt_limit,
        return_final_states=return_final_states,
    )
    return found if return_final_states else found.view(shape)
