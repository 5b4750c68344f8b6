"""Small configs and models of architectures without a patch of their own."""

import torch
import transformers
from transformers import AutoConfig

from tests.models.sizes import SIZES

PREFIX = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "seed_oss": "SeedOss", "qwen3_moe": "Qwen3Moe"}
MOE = {"moe_intermediate_size": 16, "num_experts": 6, "num_experts_per_tok": 3, "output_router_logits": True}


def config_of(arch, **more):
    return AutoConfig.for_model(
        arch,
        **{
            **SIZES,
            "vocab_size": 97,
            "max_position_embeddings": 64,
            "residual_dropout": 0.0,
            "attention_dropout": 0.0,
            **(MOE if arch == "qwen3_moe" else {}),
            **more,
        },
    )


def original(arch, config=None, head="ForCausalLM", implementation="eager"):
    """Transformers' own model; `implementation`, of attention and experts, None for those that Transformers selects."""
    torch.manual_seed(0)
    cls = getattr(transformers, PREFIX[arch] + head)
    chosen = {"attn_implementation": implementation, "experts_implementation": implementation}
    return cls._from_config(config or config_of(arch), **(chosen if implementation else {})).train()
