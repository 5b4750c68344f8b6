"""Liger-Kernel as its users call it: in place, and with its loss accumulated in the weights' dtype.

The registered `liger_kernel` implementations work on copies and accumulate in float32; these overwrite tensors that
other code may read.
"""

from __future__ import annotations

from typing import Any

import torch
from liger_kernel.ops.geglu import LigerGELUMulFunction
from liger_kernel.ops.rms_norm import LigerRMSNormFunction
from liger_kernel.ops.rope import LigerRopeFunction
from liger_kernel.ops.swiglu import LigerSiLUMulFunction
from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy
from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
from torch import Tensor, nn

from opslot._base.errors import ConfigError
from opslot.bench.baselines import hf
from opslot.ops._common.contract import takes
from opslot.ops.cross_entropy_loss.contract import LossInputs, causal


def _norm(hidden_states: Tensor, weight: Tensor, eps: float) -> Tensor:
    return LigerRMSNormFunction.apply(hidden_states, weight, eps)


def _norm_offset(hidden_states: Tensor, weight: Tensor, eps: float) -> Tensor:
    return LigerRMSNormFunction.apply(hidden_states, weight, eps, 1.0, "gemma")


def _rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    return LigerRopeFunction.apply(q, k, cos, sin, None, unsqueeze_dim)


def _gated(gate: Tensor, up: Tensor, activation: str = "silu") -> Tensor:
    function = {"silu": LigerSiLUMulFunction, "gelu_tanh": LigerGELUMulFunction}[activation]
    return function.apply(gate, up)


@takes(causal)
def _causal(inputs: LossInputs) -> Tensor:
    num_items = inputs.num_items_in_batch
    loss = liger_fused_linear_cross_entropy(
        inputs.hidden_states.reshape(-1, inputs.hidden_states.shape[-1]) * inputs.logit_scale,
        inputs.weight,
        inputs.labels.reshape(-1),
        reduction="mean" if num_items is None else "sum",
        label_smoothing=inputs.label_smoothing,
        softcap=inputs.softcap,
    )
    return loss if num_items is None else loss / num_items


KERNELS = {
    ("rms_norm", "standard"): {"in place": _norm},
    ("rms_norm", "weight_offset"): {"in place": _norm_offset},
    ("rotary_pos_emb", "full"): {"in place": _rotary},
    ("swiglu_mlp", "standard"): {"in place": _gated},
    ("cross_entropy_loss", "causal"): {"default sums": _causal},
}


def build(config: dict[str, Any], dtype: torch.dtype, device: str, attention: str = "sdpa") -> nn.Module:
    """Transformers' class with Liger's patches, which change that class in the whole process."""
    patch = MODEL_TYPE_TO_APPLY_LIGER_FN.get(config["model_type"])
    if patch is None:
        raise ConfigError(
            "Liger-Kernel has no patches for this model",
            found=f"model_type {config['model_type']!r}",
            hint="leave liger out of --baselines",
        )
    patch()
    return hf.build(config, dtype, device, attention)
