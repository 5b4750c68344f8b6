"""Transformers' own `save_pretrained` and `from_pretrained` on models with slots use the layout of the Hub."""

from __future__ import annotations

import pytest
import torch
import transformers
from safetensors import safe_open

import opslot
from opslot.generated.qwen3_moe import Qwen3MoeForCausalLM


@pytest.fixture
def original():
    config = transformers.Qwen3MoeConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config)


def names(folder):
    with safe_open(folder / "model.safetensors", "pt") as file:
        return sorted(file.keys())


def test_generated_class_loads_per_expert_tensors(original, tmp_path):
    original.save_pretrained(tmp_path)
    loaded, info = Qwen3MoeForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    for name, value in original.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name


def test_models_with_slots_save_the_hub_layout(original, tmp_path):
    original.save_pretrained(tmp_path / "original")
    opslot.build_foundation_model(original.config).save_pretrained(tmp_path / "built")
    opslot.apply(original)
    original.save_pretrained(tmp_path / "applied")
    assert names(tmp_path / "built") == names(tmp_path / "applied") == names(tmp_path / "original")


def test_subclass_of_a_generated_class_is_custom_code():
    class Mine(Qwen3MoeForCausalLM):
        pass

    assert not Qwen3MoeForCausalLM.is_custom_code()
    assert Mine.is_custom_code()
