"""Mixed precision in one process: a model computes with copies of its parameters in another dtype.

What FSDP's MixedPrecisionPolicy does, without its work on the host for each layer and each parameter, which for small
models takes longer than their forward and backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.utils import _pytree as pytree

# Of the device's memory.
_LITTLE = 0.05
_COPIES = "_mixed_precision_copies"
_NO_BACKWARD = -1


def takes_little_memory(size: int, device: torch.device) -> bool:
    """Whether `size` bytes are at most 5 % of the memory of a GPU; always on other devices."""
    return device.type != "cuda" or size <= _LITTLE * torch.cuda.get_device_properties(device).total_memory


def can_copy_parameters(model: nn.Module, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether copies in `dtype` of the parameters that have another dtype take little of the memory of `device`."""
    size = sum(parameter.numel() for parameter in model.parameters() if _is_cast(parameter, dtype)) * dtype.itemsize
    return takes_little_memory(size, device)


def compute_with_copies(model: nn.Module, dtype: torch.dtype) -> None:
    """Let `model` compute with copies of its parameters in `dtype`, in place.

    During a forward pass and its backward pass, modules hold the copies; at all other times they hold the parameters,
    which the optimizer, checkpoints and exports see. Every forward pass copies the parameters' values again.
    Gradients are computed in `dtype`, and added to those of the parameters in the parameters' dtype. Floating-point
    inputs of the model are cast to `dtype`.

    Args:
        model: its parameters may be on meta until the first forward pass. Transformers models inside it, such as the
            base model, compute with the copies too when they are called alone.
    """
    copies = _Copies(model, dtype)
    model.__dict__[_COPIES] = copies
    for module in model.modules():
        if module is model or hasattr(module, "_no_split_modules"):
            module.register_forward_pre_hook(copies.begin_forward, with_kwargs=True)
            module.register_forward_hook(copies.end_forward, always_call=True)


def has_copies(model: nn.Module) -> bool:
    """Whether `compute_with_copies` was called for `model`."""
    return _COPIES in model.__dict__


def release_copies(model: nn.Module) -> None:
    """Free the memory of the copies until the next forward pass."""
    if has_copies(model):
        model.__dict__[_COPIES].release()


class _Copies:
    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self._model, self._dtype = model, dtype
        # Where parameters are: a module's dict of parameters, name, parameter and copy.
        self._places: list[tuple[dict[str, Any], str, nn.Parameter, nn.Parameter]] = []
        self._copies: dict[nn.Parameter, nn.Parameter] = {}
        self._is_found = False
        # Modules that may be computed again in the backward pass.
        self._checkpointed: list[nn.Module] = []
        # The modules whose forward pass runs, one inside another; the backward pass that runs, and the one after which
        # gradients are moved.
        self._running: list[nn.Module] = []
        self._backward = self._moved_after = _NO_BACKWARD

    def __reduce__(self) -> tuple[Any, ...]:
        # A copied or loaded model makes its own.
        return _Copies, (self._model, self._dtype)

    def begin_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if module in self._running:
            # KeyboardInterrupt ends a forward pass without its hooks.
            self._running.clear()
        self._running.append(module)
        if len(self._running) > 1 or self._in_backward():
            return None
        self._place_parameters()
        self._find()
        self._copy_values()
        self._place_copies()
        return pytree.tree_map_only(Tensor, self._cast, (args, kwargs))

    def end_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """After a forward pass, also one that raised; `output` is None then."""
        if not self._running or self._running[-1] is not module:
            # An earlier hook raised before `begin_forward`.
            return
        self._running.pop()
        if self._running or self._in_backward():
            return
        self._place_parameters()
        found = [x for x in pytree.tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
        if found and any(getattr(module, "gradient_checkpointing", True) for module in self._checkpointed):
            register_multi_grad_hook(found, self._begin_backward, mode="any")

    @torch.inference_mode(False)  # A tensor that is made inside could not be trained outside.
    def _copy_of(self, parameter: nn.Parameter) -> nn.Parameter:
        copy = nn.Parameter(torch.empty_like(parameter, dtype=self._dtype))
        copy.register_post_accumulate_grad_hook(self._after_gradient)
        return copy

    def _after_gradient(self, copy: Tensor) -> None:
        """Move the gradients when the backward pass ends."""
        if self._moved_after != (task := torch._C._current_graph_task_id()):
            self._moved_after = task
            torch.autograd.Variable._execution_engine.queue_callback(self._move_gradients)

    @torch.no_grad()
    def _move_gradients(self) -> None:
        """Add the gradients of copies to those of the parameters, in the parameters' dtype."""
        self._moved_after = _NO_BACKWARD
        new, computed = [], []
        for parameter, copy in self._copies.items():
            if copy.grad is None:
                continue
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
                new.append(parameter.grad)
                computed.append(copy.grad)
            else:
                parameter.grad.add_(copy.grad)
            copy.grad = None
        if new:
            torch._foreach_copy_(new, computed)

    def release(self) -> None:
        self._place_parameters()
        self._places, self._copies, self._is_found = [], {}, False

    def _in_backward(self) -> bool:
        return self._backward != _NO_BACKWARD and self._backward == torch._C._current_graph_task_id()

    def _begin_backward(self, gradient: Tensor) -> None:
        """Place the copies again, for modules that are computed again."""
        if not self._in_backward():
            self._backward = torch._C._current_graph_task_id()
            self._place_copies()
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        self._backward = _NO_BACKWARD
        self._place_parameters()

    def _cast(self, x: Tensor) -> Tensor:
        return x.to(self._dtype) if x.is_floating_point() else x

    def _find(self) -> None:
        """Find the parameters again if modules hold others than before, or on another device."""
        if self._is_found and all(
            held.get(name) is parameter and parameter.device == copy.device
            for held, name, parameter, copy in self._places
        ):
            return
        self.release()
        self._is_found = True
        self._checkpointed = [
            m for m in self._model.modules() if hasattr(m, "gradient_checkpointing") or isinstance(m, CheckpointWrapper)
        ]
        for module in self._model.modules():
            held: dict[str, Any] = module._parameters
            for name, parameter in held.items():
                if parameter is None or not _is_cast(parameter, self._dtype):
                    continue
                if parameter not in self._copies:
                    self._copies[parameter] = self._copy_of(parameter)
                self._places.append((held, name, parameter, self._copies[parameter]))

    @torch.no_grad()
    def _copy_values(self) -> None:
        copies: list[Tensor] = list(self._copies.values())
        if not copies:
            return
        # The graph of an earlier forward pass may still need the copies; the values are the same then.
        with torch.autograd._unsafe_preserve_version_counter(tuple(copies)):
            torch._foreach_copy_(copies, list(self._copies))
        for parameter, copy in self._copies.items():
            copy.requires_grad_(parameter.requires_grad)
            # Of a backward pass that raised.
            copy.grad = None

    def _place_copies(self) -> None:
        for held, name, _, copy in self._places:
            held[name] = copy

    def _place_parameters(self) -> None:
        for held, name, parameter, copy in self._places:
            if held.get(name) is copy:
                held[name] = parameter


def _is_cast(parameter: nn.Parameter, dtype: torch.dtype) -> bool:
    """Whether a parameter is copied: not quantized weights, and not those of a tensor subclass."""
    if parameter.dtype == dtype or type(parameter) is not nn.Parameter:
        return False
    return parameter.is_floating_point() and parameter.itemsize > 1
