"""Small models of Transformers' classes, and checkpoints saved by Transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from transformers.utils import logging as transformers_logging

MOE_SIZES = {
    "hidden_size": 16,
    "moe_intermediate_size": 12,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
}

ModelFactory = Callable[..., nn.Module]


@pytest.fixture(autouse=True)
def quiet_transformers() -> Iterator[None]:
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    yield
    transformers_logging.set_verbosity(level)


@pytest.fixture
def make_model() -> ModelFactory:
    """`make_model("qwen3_moe", head="ForCausalLM", seed=0, device="cpu", **config)`: a small model."""

    def make(
        architecture: str, head: str = "ForCausalLM", *, seed: int = 0, device: str = "cpu", **overrides: object
    ) -> nn.Module:
        sizes: dict[str, object] = {
            "vocab_size": 40,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "tie_word_embeddings": False,
        }
        if architecture.endswith("moe"):
            sizes |= MOE_SIZES
        config = transformers.CONFIG_MAPPING[architecture](**{**sizes, **overrides})
        stem = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "seed_oss": "SeedOss", "qwen3_moe": "Qwen3Moe"}
        cls = getattr(transformers, stem[architecture] + head)
        torch.manual_seed(seed)
        with torch.device(device):
            model = cls(config)
        if device != "meta":
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.normal_()
        return model.eval()

    return make


@pytest.fixture
def moe_folder(tmp_path: Path, make_model: ModelFactory) -> Path:
    """A per-expert Qwen3-MoE checkpoint as Transformers saves it, in several shards."""
    folder = tmp_path / "moe"
    make_model("qwen3_moe").save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder
