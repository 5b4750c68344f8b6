"""Hugging Face Transformers: kernels that differ from the ops' eager code, and its own classes with SDPA."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from opslot.bench.step_inputs import model_class, trained_config
from opslot.ops._common.contract import takes
from opslot.ops.moe_experts.contract import ExpertsInputs, biased, standard


def _run_experts(given: ExpertsInputs) -> Tensor:
    """The experts implementation that Transformers selects by default, for Qwen3-MoE's or gpt-oss's experts."""
    hidden_states, experts, top_k_index, top_k_weights = given
    count, hidden, intermediate = experts.sizes
    weights = {"gate_up_proj": experts.gate_up_proj, "down_proj": experts.down_proj}
    settings: dict[str, Any] = {}
    if experts.gate_up_bias is None or experts.down_bias is None:
        from transformers import Qwen3MoeConfig
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

        config: Any = Qwen3MoeConfig(hidden_size=hidden, moe_intermediate_size=intermediate, num_experts=count)
        cls: Any = Qwen3MoeExperts
    else:
        from transformers import GptOssConfig
        from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

        config = GptOssConfig(hidden_size=hidden, intermediate_size=intermediate, num_local_experts=count)
        cls = GptOssExperts
        weights |= {"gate_up_proj_bias": experts.gate_up_bias, "down_proj_bias": experts.down_bias}
        settings = {"limit": experts.limit, "alpha": experts.alpha}
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        module = cls(config)
    vars(module).update(settings)
    return torch.func.functional_call(module, weights, (hidden_states, top_k_index, top_k_weights))


def chunk_gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor | None = None, **options: Any
) -> Any:
    """Transformers' own code where flash-linear-attention is not installed; it mixes packed documents."""
    from transformers.models.qwen3_next import modeling_qwen3_next as modeling

    if cu_seqlens is not None:
        raise NotImplementedError("no packed documents")
    groups = value.shape[2] // key.shape[2]
    query, key = (x.repeat_interleave(groups, 2) for x in (query, key))
    # Some releases wrap it in a dispatcher that prefers fla.
    return inspect.unwrap(modeling.torch_chunk_gated_delta_rule)(query, key, value, **options)


def causal_conv1d(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Transformers' own code where causal-conv1d is not installed; it mixes packed documents."""
    if cu_seqlens is not None:
        raise NotImplementedError("no packed documents")
    width, length = weight.shape[1], hidden_states.shape[-1]
    out = nn.functional.conv1d(hidden_states, weight.unsqueeze(1), bias, padding=width - 1, groups=weight.shape[0])
    out = out[..., :length]
    return out if activation is None else nn.functional.silu(out)


def mamba_chunk_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, cu_seqlens: Tensor | None = None, **options: Any
) -> Any:
    """Transformers' own code where mamba-ssm is not installed; it mixes packed documents."""
    from transformers.models.mamba2 import modeling_mamba2 as modeling

    if cu_seqlens is not None:
        raise NotImplementedError("no packed documents")
    # Some releases wrap it in a dispatcher that prefers mamba-ssm.
    return inspect.unwrap(modeling.mamba2_chunk_scan)(x, dt, A, B, C, chunk_size=256, **options).to(x.dtype)


KERNELS = {
    ("moe_experts", "standard"): {"grouped_mm": takes(standard)(_run_experts)},
    ("moe_experts", "biased"): {"grouped_mm": takes(biased)(_run_experts)},
    ("chunk_gated_delta_rule", "standard"): {"torch": chunk_gated_delta_rule},
    ("causal_conv1d", "standard"): {"torch": causal_conv1d},
    ("mamba_chunk_scan", "standard"): {"torch": mamba_chunk_scan},
}


def build(
    config: dict[str, Any], dtype: torch.dtype, device: str, attention: str = "sdpa", compiled: bool = False
) -> nn.Module:
    """A causal or multimodal language model of Transformers' own class in training mode."""
    made = trained_config(config)
    with torch.device(device):
        model: Any = model_class(made)._from_config(made, dtype=dtype, attn_implementation=attention)
    model.train()
    if compiled:
        model = torch.compile(model)
    return model
