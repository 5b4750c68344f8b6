"""A model with experts, whose layers are in other files."""

import torch
from torch import nn
from transformers import initialization
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel

from .configuration_sparrow import SparrowConfig
from .layers_finch import FinchDecoderLayer, FinchExperts, FinchNorm
from .rotary_finch import FinchRotary, frequencies


class FinchPreTrainedModel(PreTrainedModel):
    config_class = SparrowConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["FinchDecoderLayer"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True

    def _init_weights(self, module):
        super()._init_weights(module)
        if isinstance(module, FinchNorm):
            initialization.constant_(module.weight, 1.0)
        elif isinstance(module, FinchExperts):
            initialization.normal_(module.gate_up_proj, std=0.02)
            initialization.normal_(module.down_proj, std=0.02)
        elif isinstance(module, FinchRotary):
            initialization.copy_(module.inv_freq, frequencies(self.config))


class FinchModel(FinchPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([FinchDecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = FinchNorm(config.hidden_size, config.norm_eps)
        self.rotary = FinchRotary(config)
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, inputs_embeds=None, **kwargs):
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        if position_ids is None:
            position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device).unsqueeze(0)
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            past_key_values=None,
            position_ids=position_ids,
        )
        states, angles = inputs_embeds, self.rotary(inputs_embeds, position_ids)
        for layer in self.layers:
            states = layer(states, attention_mask=mask, position_embeddings=angles, **kwargs)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(states))


class FinchForCausalLM(FinchPreTrainedModel, GenerationMixin):
    def __init__(self, config):
        super().__init__(config)
        self.model = FinchModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, labels=None, **kwargs):
        states = self.model(input_ids, attention_mask, position_ids, **kwargs).last_hidden_state
        logits = self.lm_head(states)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits)
