"""LayerDrop (https://huggingface.co/papers/1909.11556) where layers have collectives.

Transformers' encoders and decoders skip each layer with the probability `layerdrop` in training, which each rank draws
for itself. Ranks that skip different layers would gather each other's parameters, or wait forever.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from opslot._base.errors import ConfigError
from opslot.distributed import ParallelState
from opslot.models._multimodal.conditional import encoders_of
from opslot.slots.binding import class_name


def run_dropped_layers(model: nn.Module, state: ParallelState) -> None:
    """Let ranks run the layers that they drop, and return their input: with gradients of zero.

    Raises:
        ConfigError: ranks of a sequence would drop different layers of a language model.
    """
    in_encoders = {module for encoder in encoders_of(model) for module in encoder.modules()}
    for owner in model.modules():
        probability = getattr(owner, "layerdrop", None)
        if not isinstance(probability, float) or not probability > 0:
            continue
        if state.sp > 1 and owner not in in_encoders:
            raise ConfigError(
                f"{class_name(owner)} drops layers (layerdrop={probability}), and ranks of a sequence (sp={state.sp}) "
                "would drop different ones",
                hint="set layerdrop to 0 in config.json, or sp to 1",
            )
        owner.layerdrop = 0.0  # type: ignore[assignment]
        for stack in owner.children():
            for layer in stack if isinstance(stack, nn.ModuleList) else ():
                layer.forward = partial(_run, layer, layer.forward, probability)


def _run(layer: nn.Module, forward: Callable[..., Any], probability: float, *args: Any, **kwargs: Any) -> Any:
    """The forward of a layer, whose first argument has the hidden states, as has its first output."""
    # The draw is one of torch's generator, so a layer that is computed again in backward has the same.
    is_dropped = layer.training and bool(torch.rand([]) < probability)
    output = forward(*args, **kwargs)
    if not is_dropped:
        return output
    hidden: Tensor = args[0] if args else kwargs["hidden_states"]
    leaves, spec = pytree.tree_flatten(output)
    leaves[0] = hidden + leaves[0].flatten()[:0].sum()
    return pytree.tree_unflatten(leaves, spec)
