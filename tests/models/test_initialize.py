"""A meta model is initialized like Transformers' class: the same constants, the same standard deviations."""

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import opslot
from opslot.checkpoint.initialize import initialize_weights

SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 7,
    "initializer_range": 0.05,
    "tie_word_embeddings": False,
}
MOE = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "qwen3_moe", "seed_oss"])
def test_initial_values_equal_transformers_in_distribution(name):
    config = CONFIG_MAPPING[name](**SIZES, **(MOE if "moe" in name else {}))
    theirs = AutoModelForCausalLM.from_config(config)
    ours = opslot.build_foundation_model(config, init_device="meta", run_device="cpu", ops_implementation="eager")
    initialize_weights(ours, 0)
    found = {**dict(ours.named_parameters()), **dict(ours.named_buffers())}
    wanted = {**dict(theirs.named_parameters()), **dict(theirs.named_buffers())}
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        value = found[key].detach()
        assert value.dtype == tensor.dtype
        if tensor.ndim < 2:
            assert torch.equal(value, tensor), key
        else:
            # The relative standard error of the standard deviation of n normal samples is 1 / sqrt(2 n).
            spread = tensor.std().item() * 5 / (2 * tensor.numel()) ** 0.5
            assert value.std().item() == pytest.approx(0.05, abs=2 * spread), key
            assert value.mean().item() == pytest.approx(0, abs=2 * spread), key
    padding = found["model.embed_tokens.weight"][7]
    assert torch.equal(padding, torch.zeros_like(padding))
