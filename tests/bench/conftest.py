import json

import pytest

QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
}


@pytest.fixture
def folder(tmp_path):
    """config.json of a tiny Qwen3-MoE."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_MOE))
    return tmp_path
