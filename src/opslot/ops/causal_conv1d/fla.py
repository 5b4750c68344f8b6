"""flash-linear-attention's causal convolution."""

from __future__ import annotations

import torch
from fla.modules.convolution import causal_conv1d as fla_conv
from torch import Tensor

from opslot.ops.causal_conv1d.op import kernel_of


def _run(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, cu_seqlens: Tensor | None) -> Tensor:
    out, _ = fla_conv(
        x.transpose(1, 2),
        weight,
        bias,
        activation=activation,
        cu_seqlens=None if cu_seqlens is None else cu_seqlens.to(torch.int64),
    )
    return out.transpose(1, 2)


causal_conv1d = kernel_of("causal_conv1d_implementation='fla'", _run)
