"""Tiny random models whose weights hide no error of a kernel."""

import torch
from transformers import AutoModelForCausalLM

from opslot.verify.tiny import tiny_config


def tiny_model(arch, noise, **changes):
    """Transformers' causal language model with some values of its config changed."""
    torch.manual_seed(0)
    config = tiny_config(arch)
    for name, value in changes.items():
        setattr(config, name, value)
    return with_noise(AutoModelForCausalLM.from_config(config), noise)


@torch.no_grad()
def with_noise(model, scale=0.1):
    """`model`, in place: where norm weights are 1 and biases 0, a kernel that drops one of them would pass."""
    for parameter in model.parameters():
        parameter.add_(scale * torch.randn_like(parameter))
    return model
