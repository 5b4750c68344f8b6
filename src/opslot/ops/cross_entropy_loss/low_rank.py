"""Output heads with adapters of PEFT: the linear layer below them, and what LoRA adds to its logits.

The weight of a head with trained copies of some rows (`trainable_token_indices`) is computed when it is read.

PEFT is not imported: a head has its layers only if it is loaded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def has_low_rank(head: Any) -> bool:
    """Whether `head` is PEFT's LoRA layer around a linear layer."""
    return _is(head, "peft.tuners.lora.layer", "Linear")


def _is(module: Any, source: str, name: str) -> bool:
    cls = type(module)
    return cls.__module__ == source and cls.__name__ == name


def layers_of(head: Any) -> list[Any]:
    """`head`, and in PEFT's wrappers what they hold, down to the layer of which `head.weight` is the weight.

    Below LoRA that is the base layer, in `modules_to_save` the trained copy.
    """
    layers = [head]
    while (inner := _inside(layers[-1])) is not None:
        layers.append(inner)
    return layers


def linear_of(head: Any) -> Any:
    """The innermost of `layers_of(head)`."""
    return layers_of(head)[-1]


def _inside(layer: Any) -> Any:
    if has_low_rank(layer):
        return layer.base_layer
    if _has_trained_rows(layer):
        return layer.original_module
    if _is(layer, "peft.utils.other", "ModulesToSaveWrapper"):
        names = layer.active_adapters
        trained = not layer.disable_adapters and names and all(name in layer.modules_to_save for name in names)
        return layer.modules_to_save[names[0]] if trained else layer.original_module
    return None


def _has_trained_rows(layer: Any) -> bool:
    return _is(layer, "peft.utils.other", "TrainableTokensWrapper")


def low_rank_problem(head: Any) -> str | None:
    """Why the adapters of `head` are more than a weight and a low-rank matmul added to the logits; None if not."""
    *wrappers, linear = layers_of(head)
    if any(map(_has_trained_rows, wrappers)) and linear.bias is not None:
        # PEFT adds the bias only after the rows were merged.
        return "the output head has trained tokens and a bias"
    if not has_low_rank(head) or head.merged or head.disable_adapters:
        return None
    for name in _active(head):
        if name in head.lora_variant:
            return f"the output head has an adapter of the kind {type(head.lora_variant[name]).__name__}"
        if head.lora_B[name].bias is not None:
            return "the output head has an adapter with a bias"
    return None


def _active(head: Any) -> list[str]:
    return [name for name in head.active_adapters if name in head.lora_A]


def low_rank_of(head: nn.Module, hidden: Tensor) -> tuple[Tensor, Tensor] | None:
    """(u [N, r], B [V, r]) of the adapters of `head`, which add u B^T to its logits; None without active adapters.

    Args:
        hidden: [N, H].
    """
    layer: Any = head
    if not has_low_rank(layer) or layer.merged or layer.disable_adapters:
        return None
    outputs, weights = [], []
    for name in _active(layer):
        down = layer.lora_A[name]
        inputs = layer.lora_dropout[name](hidden.to(down.weight.dtype))
        outputs.append(down(inputs) * layer.scaling[name])
        weights.append(layer.lora_B[name].weight)
    if not outputs:
        return None
    if len(outputs) == 1:
        return outputs[0], weights[0]
    return torch.cat(outputs, dim=-1), torch.cat(weights, dim=-1)
