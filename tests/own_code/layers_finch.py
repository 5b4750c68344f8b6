"""Layers of a model with experts, in a file of their own."""

import torch
from torch import nn
from transformers.integrations import use_experts_implementation
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward

from .rotary_finch import apply_rotary_pos_emb


class FinchNorm(nn.Module):
    def __init__(self, width, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.variance_epsilon = eps

    def forward(self, states):
        dtype = states.dtype
        states = states.to(torch.float32)
        variance = states.pow(2).mean(-1, keepdim=True)
        states = states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * states.to(dtype)


class FinchAttention(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.is_causal = True
        self.q_proj = nn.Linear(config.hidden_size, config.num_attention_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * self.head_dim, config.hidden_size, bias=False)

    def forward(self, hidden_states, position_embeddings, attention_mask=None, **kwargs):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query = self.q_proj(hidden_states).view(shape).transpose(1, 2)
        key = self.k_proj(hidden_states).view(shape).transpose(1, 2)
        value = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        cos, sin = position_embeddings
        query, key = apply_rotary_pos_emb(query, key, cos, sin)
        attention_interface = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        output, _ = attention_interface(self, query, key, value, attention_mask, scaling=self.scaling, **kwargs)
        return self.o_proj(output.reshape(*hidden_states.shape[:-1], -1))


@use_experts_implementation
class FinchExperts(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.num_experts = config.num_experts
        self.gate_up_proj = nn.Parameter(
            torch.empty(config.num_experts, 2 * config.intermediate_size, config.hidden_size)
        )
        self.down_proj = nn.Parameter(torch.empty(config.num_experts, config.hidden_size, config.intermediate_size))
        self.act_fn = nn.SiLU()

    def forward(self, tokens, chosen, weights):
        total = torch.zeros_like(tokens)
        with torch.no_grad():
            mask = torch.nn.functional.one_hot(chosen, num_classes=self.num_experts + 1)
            mask = mask.permute(2, 1, 0)
            hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()

        for expert in hit:
            expert = expert[0]
            if expert == self.num_experts:
                continue
            place, token = torch.where(mask[expert])
            given = tokens[token]
            gate, up = nn.functional.linear(given, self.gate_up_proj[expert]).chunk(2, dim=-1)
            output = self.act_fn(gate) * up
            output = nn.functional.linear(output, self.down_proj[expert])
            output = output * weights[token, place, None]
            total.index_add_(0, token, output.to(total.dtype))

        return total


class FinchMixture(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.router = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = FinchExperts(config)

    def forward(self, states):
        tokens = states.view(-1, states.shape[-1])
        weights, chosen = self.router(tokens).float().softmax(dim=-1).topk(self.top_k, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        return self.experts(tokens, chosen, weights.to(tokens.dtype)).view(states.shape)


class FinchDecoderLayer(GradientCheckpointingLayer):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.attention = FinchAttention(config, layer_idx)
        self.mixture = FinchMixture(config)
        self.attention_norm = FinchNorm(config.hidden_size, config.norm_eps)
        self.mixture_norm = FinchNorm(config.hidden_size, config.norm_eps)

    def forward(self, hidden_states, **kwargs):
        hidden_states = hidden_states + self.attention(self.attention_norm(hidden_states), **kwargs)
        return hidden_states + self.mixture(self.mixture_norm(hidden_states))
