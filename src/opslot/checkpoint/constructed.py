"""Values of tensors that only the constructors of a model compute."""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from opslot.slots.binding import original_class

# What layers of torch make parameters with. Other factory functions also compute values, such as frequencies of RoPE.
_OF_PARAMETERS = {torch.empty, torch.rand, torch.randn}


class ParametersOnMeta(TorchFunctionMode):
    """Inside, constructors make parameters that are drawn later on meta, and tensors that they compute on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _OF_PARAMETERS and kwargs.get("device") is None:
            kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


def constructor_values(model: nn.Module, names: Collection[str]) -> dict[str, Tensor]:
    """Those of the parameters and buffers `names` that the constructors of a Transformers model compute, on the CPU.

    The model is constructed again. A constructor may compute what `_init_weights` leaves alone, such as the parameters
    of xIELU.
    """
    make = getattr(original_class(model), "_from_config", None)
    config = getattr(model, "config", None)
    if make is None or config is None:
        return {}
    from transformers.initialization import no_init_weights

    with ParametersOnMeta(), no_init_weights():
        again: nn.Module = make(copy.deepcopy(config), attn_implementation="eager")
    values = {**dict(again.named_parameters(remove_duplicate=False)), **dict(again.named_buffers())}
    return {name: value.detach() for name, value in values.items() if name in names and not value.is_meta}
