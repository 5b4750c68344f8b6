"""flash-linear-attention's causal convolution."""

from __future__ import annotations

import torch
from fla.modules.convolution import causal_conv1d as fla_conv
from torch import Tensor

from opslot.ops._common.arguments import reject
from opslot.ops._common.documents import check_cu_seqlens
from opslot.ops.causal_conv1d.op import in_one_row, in_rows

_LABEL = "causal_conv1d_implementation='fla'"


def causal_conv1d(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Contract: see `op.reference`."""
    if activation not in (None, "silu", "swish"):
        reject(_LABEL, "activation", f"{activation!r} is neither None nor 'silu'", "use eager")
    batch, _, length = hidden_states.shape
    if cu_seqlens is not None:
        check_cu_seqlens(_LABEL, "cu_seqlens", cu_seqlens, batch, length)
        hidden_states = in_one_row(hidden_states)
    out, _ = fla_conv(
        hidden_states.transpose(1, 2),
        weight,
        bias,
        activation=activation,
        cu_seqlens=None if cu_seqlens is None else cu_seqlens.to(torch.int64),
    )
    out = out.transpose(1, 2)
    return out if cu_seqlens is None else in_rows(out, batch)
