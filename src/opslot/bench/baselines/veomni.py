"""VeOmni: its experts and load-balancing loss, and its model with the kernels that it is fastest with.

It pins a Transformers release, so it usually runs with `--baseline-path`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from opslot._base.device import has_package
from opslot._base.dtypes import dtype_name
from opslot.bench.step_inputs import Batch, config_of, model_class, packed, takes_images, trained_config

_MOE = "veomni.ops.kernels.moe"


def _experts(module: str, function: str) -> Callable[..., Tensor]:
    def experts(
        hidden_states: Tensor, gate_up_proj: Tensor, down_proj: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> Tensor:
        run = getattr(importlib.import_module(f"{_MOE}.{module}"), function)
        # It supports routing weights in 16 bits only.
        weights = top_k_weights.to(hidden_states.dtype)
        return run(gate_up_proj.shape[0], weights, top_k_index, hidden_states, None, None, down_proj, gate_up_proj)

    return experts


def _load_balancing_loss(
    gate_logits: Any, num_experts: int | None = None, top_k: int = 2, attention_mask: Tensor | None = None
) -> Tensor | int:
    from veomni.ops.kernels.load_balancing_loss.triton import load_balancing_loss_triton

    return load_balancing_loss_triton(gate_logits, num_experts, top_k, attention_mask)


KERNELS = {
    ("moe_experts", "standard"): {
        "triton": _experts("group_gemm", "group_gemm_fused_moe_forward"),
        "quack": _experts("quack_gemm", "quack_gemm_fused_moe_forward"),
    },
    ("load_balancing_loss", "standard"): {"triton": _load_balancing_loss},
}


def build(config: dict[str, Any], dtype: torch.dtype, device: str) -> nn.Module:
    """VeOmni's model: FlashAttention 4 and quack's experts where installed, its own defaults otherwise."""
    from veomni.arguments.arguments_types import OpsImplementationConfig
    from veomni.models import build_foundation_model

    if not dist.is_initialized():
        # Its Qwen2.5-VL reads its ranks.
        dist.init_process_group("gloo" if device == "cpu" else "nccl", store=dist.HashStore(), rank=0, world_size=1)
    made = config_of(config)
    made.architectures = [model_class(made).__name__]
    if device == "cpu":
        names = ("cross_entropy_loss", "rms_norm", "swiglu_mlp", "rotary_pos_emb", "load_balancing_loss", "moe")
        chosen = {f"{name}_implementation": "eager" for name in names} | {"attn_implementation": "sdpa"}
    else:
        chosen = {
            "attn_implementation": "flash_attention_4" if has_package("flash_attn.cute") else "sdpa",
            "moe_implementation": "fused_quack" if has_package("quack") else "fused_triton",
        }
    model = build_foundation_model(
        made,
        torch_dtype=dtype_name(dtype),
        init_device=device,
        ops_implementation=OpsImplementationConfig(**chosen),
    )
    model.train()
    trained = trained_config(config).model_type
    return next(m for m in model.modules() if getattr(getattr(m, "config", None), "model_type", None) == trained)


def prepare(batch: Batch, config: dict[str, Any], model: nn.Module) -> Batch:
    """Pack the samples, as its collator does, for models that require it: those with images or a recurrence.

    Models with images describe them on the host, through a method that the collator calls. Features of audio are
    without padding, [frames, mels].
    """
    if not takes_images(config) and "linear_attention" not in (config.get("layer_types") or ()):
        return batch
    made = packed(batch, config)
    for kind in ("image", "video", "audio"):
        token = getattr(trained_config(config), f"{kind}_token_id", None)
        if token is not None:
            made[f"{kind}_mask"] = made["input_ids"] == token
    if "feature_attention_mask" in made:
        frames = made.pop("feature_attention_mask")
        made["input_features"] = made["input_features"].transpose(1, 2)[frames.bool()]
        made["audio_feature_lengths"] = frames.sum(1)
    collate = getattr(model, "get_metadata_collate_func", None)
    if collate is not None:
        collate()(made, {})
    return made
