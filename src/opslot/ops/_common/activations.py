"""Activations of gated MLPs and experts that the kernels compute, by name, and what they are called in modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from opslot.patchgen.forms import ACTIVATION_ATTRIBUTES
from opslot.slots.protocol import ACTIVATION


@cache
def limit_has_gradient() -> bool:
    """Whether torch.clamp passes the gradient of a value that equals its limit: 2.13 does, 2.15 does not."""
    # The first call may be inside of torch.func, forward-mode AD or a backward pass. A new thread is not.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_limit_has_gradient).result()


def _limit_has_gradient() -> bool:
    one = torch.ones((), device="cpu", requires_grad=True)
    # The gradient's formula alone: a backward pass would start the threads of autograd, and this runs at imports.
    formula: Any = one.clamp(max=1.0).grad_fn
    return bool(formula(torch.ones((), device="cpu")) == 1)


# What a kernel takes as `activation`: a name below, or the module or function that a model applies.
Activation = str | Callable[[Tensor], Tensor]


def relu2(x: Tensor) -> Tensor:
    """Squared ReLU (So et al. 2021), in the dtype of `x`."""
    return torch.square(F.relu(x))


def quick_gelu(x: Tensor) -> Tensor:
    """x sigmoid(1.702 x) (Hendrycks and Gimpel 2016)."""
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": quick_gelu,
    "relu": F.relu,
    "relu2": relu2,
}


def _quick_gelu_slope(x: Tensor) -> Tensor:
    sigmoid = torch.sigmoid(1.702 * x)
    return sigmoid * (1 + 1.702 * x * (1 - sigmoid))


def _gelu_slope(x: Tensor, approximate: str = "none") -> Tensor:
    return torch.ops.aten.gelu_backward(torch.ones_like(x), x, approximate=approximate)


# The derivatives of `ACTIVATIONS` except silu, whose sigmoid the kernels use for both. Inside of ops, as which kernels
# run in compiled models, autograd records nothing.
SLOPES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": _gelu_slope,
    "gelu_tanh": partial(_gelu_slope, approximate="tanh"),
    "quick_gelu": _quick_gelu_slope,
    "relu": lambda x: (x > 0).to(x.dtype),
    "relu2": lambda x: 2 * F.relu(x),
}

# Names of classes and functions, because ops do not import Transformers. The tanh approximations of GELU differ in
# rounding only.
_NAMES = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "silu": "silu",
    "swish": "silu",
    "GELUActivation": "gelu",
    "gelu": "gelu",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "FastGELUActivation": "gelu_tanh",
    "AccurateGELUActivation": "gelu_tanh",
    "QuickGELUActivation": "quick_gelu",
    "ReLU": "relu",
    "relu": "relu",
    "ReLUSquaredActivation": "relu2",
}


def activation_name(activation: Any) -> str | None:
    """The name in `ACTIVATIONS` of a name, module or function; None for an activation that the kernels do not have."""
    if isinstance(activation, str):
        return activation if activation in ACTIVATIONS else None
    if isinstance(activation, nn.Module):
        if isinstance(activation, nn.GELU):
            return "gelu" if activation.approximate == "none" else "gelu_tanh"
        return _NAMES.get(type(activation).__name__)
    return _NAMES.get(getattr(activation, "__name__", ""))


def activation_in(module: Any) -> Any:
    """The activation that an MLP holds, or the name of the function that it calls; None if it has none."""
    names = (*ACTIVATION_ATTRIBUTES, ACTIVATION)
    return next((found for name in names if (found := getattr(module, name, None)) is not None), None)


def activate(activation: Activation, x: Tensor) -> Tensor:
    """`activation` of `x`."""
    return ACTIVATIONS[activation](x) if isinstance(activation, str) else activation(x)


def activation_problem(activation: Any) -> str | None:
    """Why the kernels do not compute this activation, or None if they do."""
    if activation_name(activation) is not None:
        return None
    found = type(activation).__name__ if isinstance(activation, nn.Module) else getattr(activation, "__name__", "")
    return f"its activation is {found or repr(activation)}, the kernels compute {', '.join(ACTIVATIONS)}"
