"""Rotary positions, in a file of their own."""

import torch
from torch import nn


class FinchRotary(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.register_buffer("inv_freq", frequencies(config), persistent=False)

    @torch.no_grad()
    def forward(self, x, position_ids):
        angles = position_ids[..., None].float() * self.inv_freq
        both = torch.cat((angles, angles), dim=-1)
        return both.cos().to(x.dtype), both.sin().to(x.dtype)


def frequencies(config):
    width = config.hidden_size // config.num_attention_heads
    steps = torch.arange(0, width, 2, dtype=torch.float32) / width
    return config.rope_base**-steps


def rotate_half(x):
    first = x[..., : x.shape[-1] // 2]
    second = x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), dim=-1)


def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    q_out = (q * cos) + (rotate_half(q) * sin)
    k_out = (k * cos) + (rotate_half(k) * sin)
    return q_out, k_out
