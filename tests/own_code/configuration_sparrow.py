"""Configs of the models beside this file."""

from transformers import PretrainedConfig


class SparrowConfig(PretrainedConfig):
    model_type = "sparrow"

    def __init__(
        self,
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        rope_base=10000.0,
        norm_eps=1e-6,
        pad_token_id=0,
        **options,
    ):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.num_experts = num_experts
        self.num_experts_per_tok = num_experts_per_tok
        self.rope_base = rope_base
        self.norm_eps = norm_eps
        super().__init__(pad_token_id=pad_token_id, **options)
