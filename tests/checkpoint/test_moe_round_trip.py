"""Every supported mixture of experts: saved by opslot, read by Transformers and by opslot."""

from __future__ import annotations

import dataclasses
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from torch import nn

import opslot
from opslot.checkpoint import save_weights
from opslot.models._build import auto_class_name
from opslot.trainer.processors import multimodal_class
from opslot.verify.tiny import tiny_config

SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "intermediate_size_mlp": 24,
    "moe_intermediate_size": 12,
    "expert_ffn_hidden_size": 12,
    "ffn_hidden_size": 24,
    "shared_expert_intermediate_size": 12,
    "moe_shared_expert_intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "moe_top_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "moe_layer_start_index": 1,
    "decoder_sparse_step": 1,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "qk_head_dim": 8,
    "v_head_dim": 8,
    "rotary_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
    "mamba_d_state": 4,
    "mamba_dt_rank": 4,
    "mamba_n_heads": 4,
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "ssm_state_size": 8,
    "n_groups": 2,
}
VISION = {
    "depth": 1,
    "hidden_size": 16,
    "out_hidden_size": 16,
    "num_heads": 2,
    "intermediate_size": 24,
    "patch_size": 4,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
# Text models and their config fields in addition to SIZES.
TEXT: dict[str, dict[str, Any]] = {
    "afmoe": {},
    "cohere2_moe": {},
    "deepseek_v2": {},
    "deepseek_v3": {},
    "dots1": {},
    "ernie4_5_moe": {},
    "exaone_moe": {},
    "flex_olmo": {},
    "glm4_moe": {},
    "glm4_moe_lite": {},
    "gpt_oss": {},
    "granitemoe": {},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "mamba_expand": 2, "mamba_d_head": 8},
    "granitemoeshared": {},
    "hunyuan_v1_moe": {},
    "hy_v3": {},
    "jamba": {},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "llama4_text": {},
    "longcat_flash": {},
    "mimo_v2_flash": {},
    "minimax": {},
    "minimax_m2": {},
    "mixtral": {},
    "nemotron_h": {"num_hidden_layers": 3, "layers_block_type": ["mamba", "moe", "attention"]},
    "olmoe": {},
    "phimoe": {},
    "qwen2_moe": {},
    "qwen3_5_moe_text": {},
    "qwen3_moe": {},
    "qwen3_next": {},
    "solar_open": {},
}
VISION_LANGUAGE = ("qwen3_vl_moe", "qwen3_5_moe", "glm4v_moe")
# With fields of their own for the sizes of their encoders; of an omni model, the part that trains.
OTHER_ENCODERS = ("qwen3_omni_moe_thinker", "minimax_m3_vl", "kimi_k25")


def config_of(model_type: str) -> Any:
    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip(f"Transformers {transformers.__version__} has no {model_type}")
    if model_type in OTHER_ENCODERS:
        return tiny_config(model_type)
    cls = transformers.CONFIG_MAPPING[model_type]
    if model_type in VISION_LANGUAGE:
        parts = {"text_config": SIZES, "vision_config": VISION}
        return cls(**{name: accepted(cls.sub_configs[name], sizes) for name, sizes in parts.items()})
    return cls(**accepted(cls, {**SIZES, **TEXT[model_type]}))


def accepted(cls: type, sizes: dict[str, Any]) -> dict[str, Any]:
    """The entries of `sizes` that the config class has; it would keep and save others as unknown entries."""
    names = set(inspect.signature(cls.__init__).parameters)
    if dataclasses.is_dataclass(cls):
        names |= {field.name for field in dataclasses.fields(cls)}
    return {name: size for name, size in sizes.items() if name in names}


def original(model_type: str) -> Any:
    """Transformers' model with every weight changed from its initial value."""
    config = config_of(model_type)
    takes_media = model_type in (*VISION_LANGUAGE, *OTHER_ENCODERS)
    cls = getattr(transformers, multimodal_class(config) if takes_media else auto_class_name(config))
    model = cls._from_config(config)
    torch.manual_seed(0)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.normal_()
    return model.eval()


def described(folder: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors in a checkpoint."""
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            found |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    return found


def assert_same(found: nn.Module, wanted: nn.Module) -> None:
    ours, theirs = found.state_dict(), wanted.state_dict()
    assert ours.keys() == theirs.keys()
    different = [name for name, tensor in theirs.items() if not torch.equal(ours[name], tensor)]
    assert different == []


def reload(model: Any, folder: Path) -> nn.Module:
    found, info = type(model).from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return found


@pytest.mark.quick(
    "mixtral", "gpt_oss", "deepseek_v3", "llama4_text", "qwen3_moe", "qwen3_vl_moe", "granitemoe", "jamba", "lfm2_moe"
)
@pytest.mark.parametrize("model_type", [*TEXT, *VISION_LANGUAGE, *OTHER_ENCODERS])
def test_default_layout_is_read_by_transformers_and_opslot(model_type: str, tmp_path: Path) -> None:
    """The default has the names, shapes and values that `save_pretrained` writes."""
    model = original(model_type)
    save_weights(model, tmp_path / "ours", max_shard_size="20KB")
    model.save_pretrained(tmp_path / "theirs")
    assert described(tmp_path / "ours") == described(tmp_path / "theirs")
    assert_same(reload(model, tmp_path / "ours"), model)
    built = opslot.build_foundation_model(
        model.config, weights_path=tmp_path / "ours", architecture=type(model).__name__
    )
    assert_same(built, model)
    save_weights(built, tmp_path / "again")
    assert described(tmp_path / "again") == described(tmp_path / "theirs")
    assert_same(reload(model, tmp_path / "again"), model)
    if model_type in OTHER_ENCODERS:
        assert any(".experts." in name for name in described(tmp_path / "again"))


@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss", "qwen3_moe", "llama4_text"])
def test_state_dict_is_saved_under_its_own_names(model_type: str, tmp_path: Path) -> None:
    model = original(model_type)
    save_weights(model.state_dict(), tmp_path, config=model.config)
    assert described(tmp_path).keys() == model.state_dict().keys()
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == model_type
    assert_same(reload(model, tmp_path), model)
