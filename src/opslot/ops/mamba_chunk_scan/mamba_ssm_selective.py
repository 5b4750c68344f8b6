"""Mamba-1's scan of the package mamba_ssm."""

from __future__ import annotations

import torch
from mamba_ssm.ops.selective_scan_interface import selective_scan_fn
from torch import Tensor

from opslot.ops._common.arguments import reject
from opslot.ops._common.contract import takes
from opslot.ops.mamba_chunk_scan.op import NO_LIMIT, Scan

_LABEL = "mamba_chunk_scan_implementation='mamba_ssm'"


@takes(Scan)
def mamba_chunk_scan(scan: Scan) -> Tensor | tuple[Tensor, Tensor]:
    """`op.reference` with softplus, x, dt, B and C of one dtype, and no packed documents, initial states or limits.

    The last states have no gradient, so they are returned only where no gradients are computed.

    Raises:
        KernelError: for these, or for arguments that the reference rejects.
    """
    x, dt, A, B, C, D, dt_bias, initial_states, softplus, limit, want_states, cu_seqlens = scan
    unsupported = {
        "cu_seqlens": (cu_seqlens is not None, "it does not separate documents"),
        "initial_states": (initial_states is not None, "it starts from zeros"),
        "dt_softplus": (not softplus, "without it, steps below zero must be zero, which it does not do"),
        "dt_limit": (tuple(limit) != NO_LIMIT, f"it has no limits, and was given {tuple(limit)}"),
        "dt": (dt.dtype != x.dtype, f"its dtype is {dt.dtype}, x's is {x.dtype}"),
        "return_final_states": (
            want_states and torch.is_grad_enabled() and x.requires_grad,
            "it has no gradient of the last states",
        ),
    }
    for argument, (given, found) in unsupported.items():
        if given:
            reject(_LABEL, argument, found, "use triton")
    scan.check(_LABEL)
    by_channel = [tensor if tensor is None else tensor.float() for tensor in (A, D, dt_bias)]
    found = selective_scan_fn(
        x.squeeze(3).transpose(1, 2),
        dt.transpose(1, 2),
        by_channel[0],
        # [B, groups, N, S].
        B.permute(0, 2, 3, 1),
        C.permute(0, 2, 3, 1),
        D=by_channel[1],
        delta_bias=by_channel[2],
        delta_softplus=True,
        return_last_state=want_states,
    )
    out, state = found if want_states else (found, None)
    out = out.transpose(1, 2)[..., None]
    return out if state is None else (out, state[:, :, None].float())
