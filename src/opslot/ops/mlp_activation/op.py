"""Activations of Transformers that torch computes in several launches: contract, references, costs and binding.

They are modules of `transformers.activations`, mostly of MLPs without a gate, whose classes have no slots. Projections
keep their forward, so LoRA, FP8 and tensor parallelism work as in Transformers. Gated MLPs and experts with kernels of
their own do not call them.

Shapes: `x` [..., I] with any strides. Returns [..., I].
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from opslot.ops._common.activations import quick_gelu, relu2
from opslot.ops._common.cost import elementwise_cost
from opslot.ops._common.model_config import sizes_of, text_config
from opslot.ops._common.module_forward import ModuleForward
from opslot.ops.mlp_activation.cases import XIELU_CASES, CaseOf, benchmark_case, cases, of_x, of_xielu
from opslot.slots import InputCase, KernelRequest, OpSpec, OpVariant


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU by tanh (Hendrycks and Gimpel 2016), in the steps of `NewGELUActivation`."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


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


# Variant -> classes of `transformers.activations`, by name because ops do not import Transformers.
_CLASSES = {
    "relu2": ("ReLUSquaredActivation",),
    "gelu_tanh": ("NewGELUActivation", "FastGELUActivation", "AccurateGELUActivation"),
    "quick_gelu": ("QuickGELUActivation",),
    "xielu": ("XIELUActivation",),
}
_VARIANT_OF_CLASS = {name: variant for variant, names in _CLASSES.items() for name in names}


def _applies_to(module: nn.Module, config: Any) -> str | None:
    # FSDP derives a class of its own.
    bases: tuple[Any, ...] = type(module).__mro__
    cls = next((base for base in bases if base.__module__ == "transformers.activations"), None)
    return None if cls is None or type(module).forward is not cls.forward else _VARIANT_OF_CLASS.get(cls.__name__)


def _forward(module: Any, kernel: Callable[..., Tensor], input: Tensor) -> Tensor:
    # By name, which is faster than to look for parameters that most activations lack. FSDP puts a prefix before it.
    if type(module).__name__.endswith("XIELUActivation"):
        return kernel(input, module.alpha_p, module.alpha_n, module.beta, module.eps)
    return kernel(input)


_MODULES = ModuleForward(_forward)


def _static_shape(request: KernelRequest) -> dict[str, int] | None:
    """The width of most MLPs of the model: an activation does not have its own."""
    return sizes_of(text_config(request), width="intermediate_size")


def _variant(
    reference: Callable[..., Tensor],
    case: CaseOf,
    description: str,
    *,
    differentiable: tuple[str, ...] = ("x",),
    further_cases: Sequence[InputCase] = (),
) -> OpVariant:
    return OpVariant(
        reference.__name__,
        reference,
        [*cases(case), *further_cases],
        differentiable,
        elementwise_cost("x"),
        check_module=_MODULES.replaced_by_others,
        static_shape=_static_shape,
        benchmark_case=functools.partial(benchmark_case, case),
        description=description,
    )


_VARIANTS = (
    _variant(relu2, of_x, "squared ReLU"),
    _variant(gelu_tanh, of_x, "GELU by tanh"),
    _variant(quick_gelu, of_x, "x sigmoid(1.702 x)"),
    _variant(
        xielu,
        of_xielu,
        "xIELU, with trained alphas",
        differentiable=("x", "alpha_p", "alpha_n"),
        further_cases=XIELU_CASES,
    ),
)

OP = OpSpec(
    name="mlp_activation",
    description="activations that torch computes in several launches: GELU by tanh or sigmoid, squared ReLU, xIELU",
    variants={variant.name: variant for variant in _VARIANTS},
    applies_to=_applies_to,
    per_module=True,
    attach=_MODULES.attach,
    detach=_MODULES.detach,
)
