"""Inputs of attention."""

import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, causal=True):
        super().__init__()
        self.is_causal = causal


def tensors(heads=4, kv_heads=2, length=24, keys=None, width=16, batch=2, dtype=torch.float32, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    shapes = ((batch, length, heads), *((batch, keys or length, kv_heads),) * 2)
    return [torch.randn(*s, width, generator=generator).to(device, dtype).transpose(1, 2) for s in shapes]


def documents(*lengths, device="cpu"):
    cu_seqlens = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
    return {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens}


OPTIONS = {
    "causal": {},
    "the call says bidirectional": {"is_causal": False},
    "window": {"sliding_window": 5},
    "scaling": {"scaling": 0.3},
    "documents": documents(20, 4, 24),
    "documents and window": documents(20, 4, 24) | {"sliding_window": 5},
    "bidirectional documents": documents(20, 4, 24) | {"is_causal": False},
}
