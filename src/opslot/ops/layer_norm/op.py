"""Layer norm (Ba et al. 2016): contract, reference, cost and binding to torch's modules, which have no slots.

Shapes: `hidden_states` [..., H] with any strides, `weight` and `bias` [H] or None. Mean and variance are computed in
float32 (float64 for float64 input). Returns the dtype of `hidden_states`; under torch.autocast on a GPU float32, as
torch's function does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from opslot.ops._common.arguments import reject, require_floats
from opslot.ops._common.cost import elementwise_cost
from opslot.ops._common.module_forward import ModuleForward
from opslot.ops.layer_norm.cases import CASES, benchmark_case
from opslot.slots import KernelRequest, OpSpec, OpVariant

MAX_WIDTH = 16384


def standard(hidden_states: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension."""
    return nn.functional.layer_norm(hidden_states, hidden_states.shape[-1:], weight, bias, eps)


def checked(kernel: str, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> torch.dtype:
    """The dtype of the output.

    Args:
        kernel: its configuration, for errors.

    Raises:
        KernelError: unsupported shapes or dtypes.
    """
    width = x.shape[-1] if x.dim() else 0
    require_floats(kernel, hidden_states=x, weight=weight, bias=bias)
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.shape != (width,):
            reject(kernel, name, f"its shape is {tuple(tensor.shape)}, not ({width},)", "use eager")
    if width > MAX_WIDTH:
        reject(kernel, "hidden_states", f"its rows have {width} elements, more than {MAX_WIDTH}", "use eager")
    if x.is_cuda and torch.is_autocast_enabled("cuda"):
        return torch.float32
    return x.dtype


def normalized_shape(module: Any) -> tuple[int, ...] | None:
    """The dims that a module normalizes, which some classes state only by their weight; None if unknown."""
    weight = getattr(module, "weight", None)
    return getattr(module, "normalized_shape", None if weight is None else tuple(weight.shape))


def _static_shape(request: KernelRequest) -> Mapping[str, int] | None:
    shape = normalized_shape(request.module)
    return {"width": shape[0]} if shape is not None and len(shape) == 1 else None


def _applies_to(module: nn.Module, config: Any) -> str | None:
    return "standard" if type(module).forward is nn.LayerNorm.forward else None


def _forward(module: Any, kernel: Callable[..., Tensor], input: Tensor) -> Tensor:
    return kernel(input, module.weight, module.bias, module.eps)


_MODULES = ModuleForward(_forward)

OP = OpSpec(
    name="layer_norm",
    description="layer norms",
    variants={
        "standard": OpVariant(
            "standard",
            standard,
            CASES,
            ("hidden_states", "weight", "bias"),
            elementwise_cost("hidden_states"),
            check_module=_MODULES.replaced_by_others,
            static_shape=_static_shape,
            benchmark_case=benchmark_case,
            description="of the last dimension, with or without weight and bias",
        )
    },
    applies_to=_applies_to,
    per_module=True,
    attach=_MODULES.attach,
    detach=_MODULES.detach,
)
