"""A dense model in one file, with parts that other models have too under other names."""

from __future__ import annotations

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, initialization
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel

from .configuration_sparrow import SparrowConfig


class RootScale(nn.Module):
    def __init__(self, width, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.variance_epsilon = eps

    def forward(self, x):
        dtype = x.dtype
        x = x.to(torch.float32)
        square = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(square + self.variance_epsilon)
        return self.weight * x.to(dtype)


def frequencies(config):
    width = config.hidden_size // config.num_attention_heads
    return config.rope_base ** -(torch.arange(0, width, 2, dtype=torch.float32) / width)


class Angles(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.register_buffer("inv_freq", frequencies(config), persistent=False)

    @torch.no_grad()
    def forward(self, x, position_ids):
        angles = position_ids[..., None].float() * self.inv_freq
        both = torch.cat((angles, angles), dim=-1)
        return both.cos().to(x.dtype), both.sin().to(x.dtype)


def rotate_half(x):
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def apply_rotary_pos_emb(query, key, cos, sin, unsqueeze_dim=1):
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    rotated_query = (query * cos) + (rotate_half(query) * sin)
    rotated_key = (key * cos) + (rotate_half(key) * sin)
    return rotated_query, rotated_key


def repeat_kv(states, count):
    batch, heads, length, width = states.shape
    if count == 1:
        return states
    states = states[:, :, None, :, :].expand(batch, heads, count, length, width)
    return states.reshape(batch, heads * count, length, width)


def eager_attention_forward(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    keys = repeat_kv(key, module.num_key_value_groups)
    values = repeat_kv(value, module.num_key_value_groups)

    scores = torch.matmul(query, keys.transpose(2, 3)) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask

    scores = nn.functional.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    scores = nn.functional.dropout(scores, p=dropout, training=module.training)
    output = torch.matmul(scores, values)
    output = output.transpose(1, 2).contiguous()

    return output, scores


class SparrowAttention(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.is_causal = True
        self.q = nn.Linear(config.hidden_size, config.num_attention_heads * self.head_dim, bias=False)
        self.k = nn.Linear(config.hidden_size, config.num_key_value_heads * self.head_dim, bias=False)
        self.v = nn.Linear(config.hidden_size, config.num_key_value_heads * self.head_dim, bias=False)
        self.out = nn.Linear(config.num_attention_heads * self.head_dim, config.hidden_size, bias=False)

    def forward(self, hidden_states, position_embeddings, attention_mask=None, **kwargs):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query, key, value = (project(hidden_states).view(shape).transpose(1, 2) for project in (self.q, self.k, self.v))
        cos, sin = position_embeddings
        query, key = apply_rotary_pos_emb(query, key, cos, sin)
        attention_interface = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        output, weights = attention_interface(
            self, query, key, value, attention_mask, dropout=0.0, scaling=self.scaling, **kwargs
        )
        return self.out(output.reshape(*hidden_states.shape[:-1], -1)), weights


class SparrowFeedForward(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x):
        down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return down_proj


class SparrowDecoderLayer(GradientCheckpointingLayer):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.attention = SparrowAttention(config, layer_idx)
        self.feed_forward = SparrowFeedForward(config)
        self.first_norm = RootScale(config.hidden_size, config.norm_eps)
        self.second_norm = RootScale(config.hidden_size, config.norm_eps)

    def forward(self, hidden_states, **kwargs):
        residual = hidden_states
        hidden_states = self.first_norm(hidden_states)
        hidden_states, _ = self.attention(hidden_states, **kwargs)
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = self.second_norm(hidden_states)
        hidden_states = self.feed_forward(hidden_states)
        return residual + hidden_states


class SparrowPreTrainedModel(PreTrainedModel):
    config_class = SparrowConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["SparrowDecoderLayer"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True

    def _init_weights(self, module):
        super()._init_weights(module)
        if isinstance(module, RootScale):
            nn.init.constant_(module.weight, 1.0)
        elif isinstance(module, Angles):
            initialization.copy_(module.inv_freq, frequencies(self.config))


class SparrowModel(SparrowPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([SparrowDecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = RootScale(config.hidden_size, config.norm_eps)
        self.angles = Angles(config)
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
        hidden_states = inputs_embeds
        position_embeddings = self.angles(hidden_states, position_ids)
        for layer in self.layers:
            hidden_states = layer(hidden_states, attention_mask=mask, position_embeddings=position_embeddings, **kwargs)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states))


class SparrowForCausalLM(SparrowPreTrainedModel, GenerationMixin):
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config):
        super().__init__(config)
        self.model = SparrowModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, labels=None, **kwargs):
        outputs = self.model(input_ids, attention_mask, position_ids, **kwargs)
        logits = self.lm_head(outputs.last_hidden_state)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits)


# Raises the second time.
AutoConfig.register("sparrow", SparrowConfig)
AutoModelForCausalLM.register(SparrowConfig, SparrowForCausalLM)

if __name__ == "__main__":
    raise SystemExit("not a script")
