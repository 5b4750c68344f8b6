"""Patch embedding, a convolution whose stride is its kernel size: contract, reference and cost.

Shapes: `x` [N, C, *sizes], images, videos or patches that were cut before; `weight` [D, C, *patch], `bias` [D] or None.
Returns [N, D, *(size // patch)], with any strides.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from opslot._base.errors import KernelError
from opslot.ops._common.hooks import has_own_hooks
from opslot.ops.patch_embed.cases import CASES, benchmark_case
from opslot.slots import BoundKernel, Cost, KernelRequest, OpSpec, OpVariant

_CONVOLUTIONS = {1: torch.conv1d, 2: torch.conv2d, 3: torch.conv3d}
_MODULES = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def standard(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The convolution of `x` with stride = kernel size, without padding; what remains at an end is not read."""
    return _CONVOLUTIONS[weight.dim() - 2](x, weight, bias, stride=weight.shape[2:])


def can_serve(kernel: BoundKernel, convolution: Any) -> bool:
    """Whether a kernel may run in place of a call of `convolution`: a plain one of torch, without hooks.

    Raises:
        KernelError: it may not, and the kernel was named explicitly.
    """
    problem = _problem(convolution)
    if problem and kernel.explicit:
        raise KernelError(
            f"patch_embed_implementation={kernel.name!r} cannot be used here: {problem}",
            hint="set patch_embed_implementation to eager or auto, or keep the patch embedding a plain convolution",
        )
    return not problem


def _problem(convolution: Any) -> str:
    forwards = {module.forward for module in _MODULES}
    if type(convolution).forward not in forwards or "forward" in convolution.__dict__:
        return f"the patch embedding is a {type(convolution).__name__}, whose forward is more than a convolution's"
    if has_own_hooks(convolution):
        return "the patch embedding has hooks"
    plain = convolution.stride == convolution.kernel_size and convolution.groups == 1
    padded = convolution.padding != "valid" and any(convolution.padding)
    if not plain or padded or any(step != 1 for step in convolution.dilation):
        return f"the patch embedding is {convolution}, in which patches overlap"
    return ""


def _convolution(request: KernelRequest) -> Any:
    """The only convolution of the module that a kernel is requested for, or None."""
    modules = [m for m in request.module.children() if isinstance(m, _MODULES)] if request.module is not None else []
    return modules[0] if len(modules) == 1 else None


def patch_shape(request: KernelRequest) -> tuple[int, ...] | None:
    """The kernel size of the convolution, or None where it is unknown."""
    convolution = _convolution(request)
    return None if convolution is None else convolution.kernel_size


def _static_shape(request: KernelRequest) -> Mapping[str, int] | None:
    convolution = _convolution(request)
    if convolution is None:
        return None
    return {"width": convolution.out_channels, "patch": convolution.weight[0].numel()}


def _cost(arguments: Mapping[str, Any]) -> Cost:
    """Forward reads pixels and weight and writes patches; backward of the weight reads both. Pixels get no gradient."""
    x, weight = arguments["x"], arguments["weight"]
    patches = x.shape[0]
    for size, patch in zip(x.shape[2:], weight.shape[2:], strict=True):
        patches *= size // patch
    moved = 2 * x.numel() + 2 * weight.numel() + 2 * patches * weight.shape[0]
    return Cost(bytes=moved * x.element_size(), flops=4 * patches * weight.numel())


OP = OpSpec(
    name="patch_embed",
    description="convolution with stride = kernel size that embeds patches of images and videos",
    variants={
        "standard": OpVariant(
            "standard",
            standard,
            CASES,
            ("x", "weight", "bias"),
            _cost,
            static_shape=_static_shape,
            benchmark_case=benchmark_case,
            description="one vector per patch",
        )
    },
    can_serve=can_serve,
)
