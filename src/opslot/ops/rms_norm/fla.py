"""flash-linear-attention's gated RMSNorm, which rounds once, at its end."""

from __future__ import annotations

from fla.modules.fused_norm_gate import rms_norm_gated
from torch import Tensor

from opslot.ops._common.arguments import reject

_LABEL = "rms_norm_gated_implementation='fla'"
# Bytes of one row, which the kernel loads as one block.
_WIDEST = 65536


def gated(hidden_states: Tensor, weight: Tensor, eps: float, gate: Tensor) -> Tensor:
    """`op.gated`; the first call with a new width tunes fla's kernels."""
    width = hidden_states.shape[-1]
    if width * hidden_states.element_size() > _WIDEST:
        limit = _WIDEST // hidden_states.element_size()
        reject(_LABEL, "hidden_states", f"its rows have {width} elements, the limit is {limit}", "use triton")
    if gate.shape != hidden_states.shape:
        found = f"its shape is {tuple(gate.shape)}, not {tuple(hidden_states.shape)}"
        reject(_LABEL, "gate", found, "give it the shape of hidden_states")
    if not hidden_states.numel():
        # fla fails for zero rows.
        return hidden_states + 0.0 * (gate.to(hidden_states.dtype) + weight.to(hidden_states.dtype))
    return rms_norm_gated(hidden_states, gate, weight, None, activation="swish", eps=eps)
