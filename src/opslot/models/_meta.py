"""Models without memory for their parameters, but with the values of buffers that only their constructors compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

from opslot.checkpoint.initialize import ParametersOnMeta

_Model = TypeVar("_Model", bound=nn.Module)


def with_parameters_on_meta(make: Callable[[], _Model], device: torch.device | str) -> _Model:
    """The model that `make` constructs, with its parameters on meta, and buffers that have values on `device`.

    Code written for Transformers before 5 computes buffers in its constructors alone, outside of `_init_weights`.
    """
    with ParametersOnMeta():
        model = make()
    moved: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and not parameter.is_meta:
                # A tied parameter stays tied.
                on_meta = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
                module._parameters[name] = moved.setdefault(id(parameter), on_meta)
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:
                module._buffers[name] = buffer.to(device)
    return model
