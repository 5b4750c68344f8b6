"""Linear layers and other multiplications by a module's own weight, such as a router's: contract and binding.

Variants: `standard` is linear layers, `unaligned` those with sizes that are not multiples of 16 bytes in 16-bit dtypes,
`head` those whose precision decides: output heads, modules such as routers that multiply by a separate weight, and
projections to few values, such as the decays of a gated delta net, or from few, such as those of LoRA.

`auto` selects kernels for `unaligned` alone and leaves other modules as they are. Where a kernel is selected, a linear
layer calls it instead of its forward, and another module that multiplies by its own matrices runs its forward with
torch's matmuls replaced.

Shapes: `input` [..., K] and `weight` [V, K] with any strides, `bias` [V] or None. Returns [..., V].
"""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from opslot.ops._common.model_config import language_config
from opslot.ops.linear.aligned import is_unaligned
from opslot.ops.linear.cases import CASES, UNALIGNED_CASES, benchmark_case
from opslot.slots import Cost, InputCase, KernelRequest, OpSpec, OpVariant


def standard(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """input weight^T + bias."""
    return nn.functional.linear(input, weight, bias)


def _static_shape(request: KernelRequest) -> Mapping[str, int] | None:
    weight = getattr(request.module, "weight", None)
    if weight is None or weight.dim() != 2:
        return None
    return {"width": weight.shape[1], "outputs": weight.shape[0]}


def _cost(arguments: Mapping[str, Any]) -> Cost:
    """A matmul in forward, and two in backward."""
    x, weight = arguments["input"], arguments["weight"]
    rows, (outputs, width) = x.numel() // max(x.shape[-1], 1), weight.shape
    size = 3 * (x.numel() + weight.numel()) + 2 * rows * outputs
    return Cost(bytes=size * x.element_size(), flops=6 * rows * outputs * width)


def _is_plain(module: nn.Module) -> bool:
    """Whether it is a linear layer whose forward is torch's."""
    return type(module).forward is nn.Linear.forward


_MATMULS = frozenset({"linear", "matmul", "mm"})


@functools.cache
def _multiplies(cls: Any) -> bool:
    """Whether code of the class itself, not of torch, multiplies matrices."""
    own = [base for base in cls.__mro__ if not base.__module__.startswith("torch.")]
    functions = [inspect.unwrap(value) for base in own for value in vars(base).values() if inspect.isfunction(value)]
    return any(
        instruction.argrepr == "@" if instruction.opname == "BINARY_OP" else instruction.argval in _MATMULS
        for function in functions
        for instruction in dis.get_instructions(function)
        if instruction.opname == "BINARY_OP" or isinstance(instruction.argval, str)
    )


def _applies_to(module: nn.Module, config: Any) -> str | None:
    cls: Any = type(module)
    if _is_plain(module):
        weight: Any = module.weight
        if weight.shape[0] in _head_sizes(config) or _is_narrow(weight):
            return "head"
        return "unaligned" if is_unaligned(weight) else "standard"
    has_matrix = any(p.dim() > 1 and p.is_floating_point() for p in module.parameters(recurse=False))
    return "head" if has_matrix and _multiplies(cls) else None


# Of a narrow projection: the most inputs or outputs, and how many times more it has of the others.
_NARROW, _RATIO = 64, 16


def _is_narrow(weight: Tensor) -> bool:
    """Whether a projection has few inputs or outputs, so that a lower precision would not make it faster."""
    few, many = sorted(weight.shape)
    return few <= _NARROW and many >= _RATIO * few


def _head_sizes(config: Any) -> set[int | None]:
    """Sizes of the outputs of a model with this config: its vocabulary and its number of classes."""
    return {getattr(language_config(config), "vocab_size", None), getattr(config, "num_labels", None)}


class _Matmuls(TorchFunctionMode):
    """Runs a kernel for torch's multiplications by a matrix."""

    def __init__(self, kernel: Callable[..., Tensor]) -> None:
        super().__init__()
        self.kernel = kernel

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is nn.functional.linear:
            return self.kernel(*args, **(kwargs or {}))
        if func in _BY_MATRIX and not kwargs and args[1].dim() == 2:
            return self.kernel(args[0], args[1].t())
        return func(*args, **(kwargs or {}))


_BY_MATRIX = frozenset({torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__})


def _linear_forward(module: Any, kernel: Callable[..., Tensor], input: Tensor) -> Tensor:
    return kernel(input, module.weight, module.bias)


def _forward_with_kernel(
    module: nn.Module,
    kernel: Callable[..., Tensor],
    forward: Callable[..., Any] | None,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """`forward`, or that of the module's class, with torch's matmuls replaced."""
    with _Matmuls(kernel):
        return type(module).forward(module, *args, **kwargs) if forward is None else forward(*args, **kwargs)


def _attach(module: nn.Module, slot: Any, kernel: Callable[..., Tensor] | None) -> Callable[..., Any] | None:
    """Replace the forward of the instance; returns the one that it had in its `__dict__`."""
    previous = module.__dict__.get("forward")
    if kernel is None:
        return previous
    forward: Callable[..., Any]
    if _is_plain(module) and previous is None:
        forward = functools.partial(_linear_forward, module, kernel)
    else:
        forward = functools.partial(_forward_with_kernel, module, kernel, previous)
    module.__dict__["forward"] = forward
    return previous


def _detach(module: nn.Module, previous: Callable[..., Any] | None) -> None:
    module.__dict__.pop("forward", None)
    if previous is not None:
        module.__dict__["forward"] = previous


def _variant(name: str, cases: list[InputCase], where: str, config_field: str | None = None) -> OpVariant:
    return OpVariant(
        name,
        standard,
        cases,
        ("input", "weight", "bias"),
        _cost,
        config_field=config_field,
        static_shape=_static_shape,
        benchmark_case=benchmark_case,
        description=f"input weight^T + bias, {where}",
    )


_VARIANTS = (
    _variant("standard", CASES, "in linear layers"),
    _variant("unaligned", UNALIGNED_CASES, "with sizes that are not multiples of 16 bytes"),
    _variant(
        "head",
        CASES[:3],
        "in output heads, routers and projections to or from few values",
        "linear_head_implementation",
    ),
)


def _quantized_layers(model: Any) -> str:
    """A line on layers that compute with quantized weights, outside of any slot."""
    found = [module.quantization for module in model.modules() if hasattr(module, "quantization")]
    if not found:
        return ""
    return f"{len(found)} linear layers compute with {found[0]} weights; the kernels above run around them"


OP = OpSpec(
    name="linear",
    description="linear layers, and routers where a kernel is named",
    variants={variant.name: variant for variant in _VARIANTS},
    applies_to=_applies_to,
    per_module=True,
    attach=_attach,
    detach=_detach,
    note=_quantized_layers,
)
