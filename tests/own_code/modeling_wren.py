"""A model as they were written for earlier releases: attention, masks and loss of its own, angles by position."""

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel

from .configuration_sparrow import SparrowConfig


class WrenRMSNorm(nn.Module):
    def __init__(self, width, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)


class WrenRotary(nn.Module):
    def __init__(self, width, base, longest=64):
        super().__init__()
        self.width, self.base, self.longest = width, base, longest
        self.register_buffer("cos_cached", torch.empty(longest, width), persistent=False)
        self.register_buffer("sin_cached", torch.empty(longest, width), persistent=False)
        self.fill()

    def fill(self):
        steps = torch.arange(0, self.width, 2).float() / self.width
        angles = torch.outer(torch.arange(self.longest).float(), self.base**-steps)
        both = torch.cat((angles, angles), dim=-1)
        self.cos_cached.data.copy_(both.cos())
        self.sin_cached.data.copy_(both.sin())

    def forward(self, x, seq_len):
        return self.cos_cached[:seq_len].to(x.dtype), self.sin_cached[:seq_len].to(x.dtype)


def rotate_half(x):
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def apply_rotary_pos_emb(q, k, cos, sin, position_ids):
    cos = cos[position_ids].unsqueeze(1)
    sin = sin[position_ids].unsqueeze(1)
    return (q * cos) + (rotate_half(q) * sin), (k * cos) + (rotate_half(k) * sin)


class WrenAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads = config.num_attention_heads
        self.head_dim = config.hidden_size // self.heads
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.rotary = WrenRotary(self.head_dim, config.rope_base)

    def forward(self, hidden_states, attention_mask, position_ids):
        batch, length, width = hidden_states.shape
        q, k, v = self.qkv(hidden_states).view(batch, length, 3, self.heads, self.head_dim).permute(2, 0, 3, 1, 4)
        cos, sin = self.rotary(v, seq_len=length)
        q, k = apply_rotary_pos_emb(q, k, cos, sin, position_ids)
        output = F.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask)
        return self.o_proj(output.transpose(1, 2).reshape(batch, length, width))


class WrenMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class WrenDecoderLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.self_attn = WrenAttention(config)
        self.mlp = WrenMLP(config)
        self.input_layernorm = WrenRMSNorm(config.hidden_size)
        self.post_attention_layernorm = WrenRMSNorm(config.hidden_size)

    def forward(self, hidden_states, attention_mask, position_ids):
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        hidden_states = self.self_attn(hidden_states, attention_mask, position_ids)
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = self.post_attention_layernorm(hidden_states)
        hidden_states = self.mlp(hidden_states)
        return residual + hidden_states


class WrenForCausalLM(PreTrainedModel):
    config_class = SparrowConfig
    base_model_prefix = "wren"

    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([WrenDecoderLayer(config) for _ in range(config.num_hidden_layers)])
        self.norm = WrenRMSNorm(config.hidden_size)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.weight.data.normal_(mean=0.0, std=0.02)
        elif isinstance(module, WrenRMSNorm):
            module.weight.data.fill_(1.0)
        elif isinstance(module, WrenRotary):
            module.fill()

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, labels=None, **kwargs):
        length = input_ids.shape[1]
        if position_ids is None:
            position_ids = torch.arange(length, device=input_ids.device).expand_as(input_ids)
        mask = torch.ones(length, length, dtype=torch.bool, device=input_ids.device).tril()[None, None]
        hidden_states = self.embed_tokens(input_ids)
        for layer in self.layers:
            hidden_states = layer(hidden_states, mask, position_ids)
        hidden_states = self.norm(hidden_states)
        logits = self.lm_head(hidden_states)
        logits = logits.float()

        loss = None
        if labels is not None:
            shift_logits = logits[..., :-1, :].contiguous()
            shift_labels = labels[..., 1:].contiguous()
            loss_fct = nn.CrossEntropyLoss()
            shift_logits = shift_logits.view(-1, self.config.vocab_size)
            shift_labels = shift_labels.view(-1)
            loss = loss_fct(shift_logits, shift_labels)
        return CausalLMOutputWithPast(loss=loss, logits=logits)
