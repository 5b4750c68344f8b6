"""`lora.quantization: nf4` (QLoRA)."""

import json

import pytest
import torch
from safetensors.torch import load_file

from opslot._base.errors import ConfigError
from opslot.cli import main
from opslot.models import quantized_linear
from opslot.trainer.callbacks import read_metrics
from tests.trainer.test_lora import run_config

QWEN3 = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 260,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
}
