"""A mixture of experts inside a vision-language model: the auxiliary loss uses its text config."""

from types import SimpleNamespace

import torch
from transformers import AutoConfig

import opslot
from opslot.trainer.base import BaseTrainer


def test_aux_loss_of_a_vision_language_model():
    text = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.5,
        "output_router_logits": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
    }
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    vision |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}
    config = AutoConfig.for_model("qwen3_vl_moe", text_config=text, vision_config=vision)
    model = opslot.build_foundation_model(config)
    ids = torch.arange(1, 25).view(2, 12)
    outputs = model(input_ids=ids, labels=ids, use_cache=False, output_router_logits=True)
    cross_entropy, aux = BaseTrainer.split_loss(SimpleNamespace(model=model), outputs)
    torch.testing.assert_close(aux, 0.5 * outputs.aux_loss)
    torch.testing.assert_close(cross_entropy + aux, outputs.loss)
    outputs.loss.backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()
    after = model(input_ids=ids, labels=ids, use_cache=False, output_router_logits=True).loss
    assert after < outputs.loss
