"""The activation between the two projections of an MLP without a gate: contract, references and costs.

The slot is on the call of the activation, so projections keep their forward, and LoRA, FP8 and tensor parallelism work
as in Transformers.

Shapes: `x` [..., I] with any strides. Returns [..., I].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from opslot._base.errors import KernelError
from opslot.ops._common.activations import activation_in, activation_name
from opslot.ops._common.cost import elementwise_cost
from opslot.ops._common.hooks import has_own_hooks
from opslot.ops._common.model_config import activation_width
from opslot.ops.mlp_activation.cases import (
    RELU2_CASES,
    XIELU_CASES,
    relu2_benchmark_case,
    xielu_benchmark_case,
)
from opslot.slots import BoundKernel, KernelRequest, OpSpec, OpVariant


def relu2(x: Tensor) -> Tensor:
    """Squared ReLU (So et al. 2021), in the dtype of `x`."""
    return torch.square(F.relu(x))


def xielu(x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: Tensor, eps: Tensor) -> Tensor:
    """xIELU (Huang and Schlag 2024), as `XIELUActivation` of Transformers computes it without its CUDA package.

    softplus(alpha_p) x^2 + beta x for x > 0, else (beta + softplus(alpha_n)) (expm1(min(x, eps)) - x) + beta x.
    `alpha_p` and `alpha_n` [1] are trained, `beta` and `eps` [] are not. Returns the dtype that torch promotes `x` and
    the alphas to. Under torch.autocast, kernels return that of `x`, which the next projection would cast to.
    """
    positive = F.softplus(alpha_p)
    negative = beta + F.softplus(alpha_n)
    return torch.where(
        x > 0,
        positive * x * x + beta * x,
        (torch.expm1(torch.min(x, eps)) - x) * negative + beta * x,
    )


def _has_relu2(module: Any) -> str | None:
    activation = activation_in(module)
    if activation_name(activation) == "relu2":
        return None
    return f"its activation is {_called(activation)}, the kernels compute squared ReLU"


def _has_xielu(module: Any) -> str | None:
    activation = activation_in(module)
    # By name, because ops do not import Transformers.
    if type(activation).__name__ == "XIELUActivation":
        return None
    return f"its activation is {_called(activation)}, the kernels compute xIELU"


def can_serve(kernel: BoundKernel, activation: Any) -> bool:
    """Whether a kernel may run in place of a call of `activation`: one whose call only runs the forward of its class.

    Parameters of an activation with hooks, as of an FSDP group of its own, may not be there yet.

    Raises:
        KernelError: it may not, and the kernel was named explicitly.
    """
    replaced = "forward" in activation.__dict__
    if not replaced and not has_own_hooks(activation):
        return True
    if kernel.explicit:
        raise KernelError(
            f"mlp_activation_implementation={kernel.name!r} cannot be used here: the activation "
            f"{type(activation).__name__} has {'a replaced forward' if replaced else 'hooks'}",
            hint="set mlp_activation_implementation to eager or auto, or keep the activation without "
            "(an FSDP group of its own has hooks)",
        )
    return False


def _called(activation: Any) -> str:
    return "unknown" if activation is None else getattr(activation, "__name__", type(activation).__name__)


def _static_shape(request: KernelRequest) -> Mapping[str, int] | None:
    return activation_width(request, "down_proj", "fc2", "linear_fc2", "c_proj")


OP = OpSpec(
    name="mlp_activation",
    description="the activation of an MLP without a gate: xIELU, squared ReLU",
    can_serve=can_serve,
    variants={
        "relu2": OpVariant(
            "relu2",
            relu2,
            RELU2_CASES,
            ("x",),
            elementwise_cost("x"),
            check_module=_has_relu2,
            static_shape=_static_shape,
            benchmark_case=relu2_benchmark_case,
            description="squared ReLU",
        ),
        "xielu": OpVariant(
            "xielu",
            xielu,
            XIELU_CASES,
            ("x", "alpha_p", "alpha_n"),
            elementwise_cost("x"),
            check_module=_has_xielu,
            static_shape=_static_shape,
            benchmark_case=xielu_benchmark_case,
            description="xIELU, with trained alphas",
        ),
    },
)
