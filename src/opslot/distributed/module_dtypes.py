"""Modules in which parameters in the dtype of the computation would meet tensors in another one.

Transformers builds a model in bfloat16 with its buffers in bfloat16, and casts inputs to the dtype in its config.
Mixed precision casts parameters and the inputs of the whole model alone, but not the parameters that Transformers keeps
in float32, such as the weights of routers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.overrides import TorchFunctionMode

# Their inputs and weights must have one dtype. What a layer projects, it has normalized before.
_NORMS, _PROJECTIONS = (nn.LayerNorm, nn.GroupNorm), (nn.Linear, _ConvNd)
_MATMULS = {torch.matmul, torch.bmm, torch.mm, Tensor.matmul, Tensor.bmm, Tensor.mm, Tensor.__matmul__}


def compute_in_dtype(model: nn.Module, dtype: torch.dtype) -> None:
    """Let modules of a model that computes with parameters in `dtype` take what its forward makes in another dtype.

    Norms, and linear layers and convolutions outside of layers, get inputs in `dtype`, also after buffers such as
    positions. Batch norms compute in the dtype of their running statistics. Matmuls of modules with masks or decays in
    buffers take operands of several dtypes.
    """
    projections = {module for module in _outside_of_layers(model) if isinstance(module, _PROJECTIONS)}
    for module in model.modules():
        if module in projections or isinstance(module, _NORMS):
            module.register_forward_pre_hook(InputCast(dtype))
        is_plain = type(module).forward is _BatchNorm.forward and "forward" not in module.__dict__
        if is_plain and module.running_mean is not None:
            module.forward = partial(_batch_norm, module)
        if any(b is not None and b.is_floating_point() and b.ndim > 1 for b in module._buffers.values()):
            cast = _MatmulCast(dtype)
            module.register_forward_pre_hook(cast.begin_forward)
            module.register_forward_hook(cast.end_forward, always_call=True)


def kept_in_float32(model: nn.Module, dtype: torch.dtype) -> set[tuple[nn.Module, str]]:
    """The parameters, by module and name, that a model of Transformers keeps in float32 where it computes in `dtype`.

    They are those of `_keep_in_fp32_modules_strict`, and in float16 also of `_keep_in_fp32_modules`: patterns of names,
    to which Transformers' code and checkpoints are written. Parameters may be sharded, and adapters around layers.
    """
    found: set[tuple[nn.Module, str]] = set()
    for inner in model.modules():
        plan = getattr(inner, "_get_dtype_plan", None)
        patterns = [name for name, kept in plan(dtype).items() if kept == torch.float32] if plan is not None else []
        if not patterns:
            continue
        # As Transformers reads them.
        pattern = re.compile("|".join(f"(?:{name.replace('*', '.*')})" for name in patterns))
        for path, module in inner.named_modules():
            prefix = f"{path.replace('.base_layer', '')}." if path else ""
            found |= {(module, name) for name in module._parameters if pattern.search(prefix + name)}
    return found


def _outside_of_layers(module: nn.Module) -> Iterator[nn.Module]:
    yield module
    for child in module.children():
        # torch reads the weights of MultiheadAttention's layer without calling it.
        if not isinstance(child, nn.ModuleList | nn.MultiheadAttention):
            yield from _outside_of_layers(child)


class InputCast:
    """Forward pre-hook that gives a module with weights in `dtype`, not quantized ones, its first input in it."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> Any:
        if not args or not isinstance(x := args[0], Tensor) or not x.is_floating_point() or x.dtype == self.dtype:
            return None
        # Not `module.weight`: a parametrized one is computed each time it is read, in training with other buffers.
        weight = next(module.parameters(), None)
        return (x.to(self.dtype), *args[1:]) if weight is not None and weight.dtype == self.dtype else None


class _MatmulCast(TorchFunctionMode):
    """Hooks and their mode: a matmul of operands in several dtypes, which raises in torch, is one in `dtype`."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self._entered = 0

    def begin_forward(self, module: nn.Module, args: Any) -> None:
        self._entered += 1
        self.__enter__()

    def end_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._entered:
            self._entered -= 1
            self.__exit__(None, None, None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _MATMULS:
            found = {x.dtype for x in args if isinstance(x, Tensor) and x.is_floating_point()}
            if len(found) > 1:
                args = tuple(x.to(self.dtype) if isinstance(x, Tensor) else x for x in args)
        return func(*args, **(kwargs or {}))


def _batch_norm(norm: Any, x: Tensor) -> Tensor:
    """The forward of a batch norm whose parameters have another dtype than its running statistics."""
    norm._check_input_dim(x)
    momentum = norm.momentum
    if norm.training:
        norm.num_batches_tracked.add_(1)
        momentum = 1 / float(norm.num_batches_tracked) if momentum is None else momentum
    mean, variance = norm.running_mean, norm.running_var
    weight, bias = (None if p is None else p.to(mean.dtype) for p in (norm.weight, norm.bias))
    outputs = batch_norm(x.to(mean.dtype), mean, variance, weight, bias, norm.training, momentum or 0.0, norm.eps)
    return outputs.to(x.dtype)
