"""Mixed precision and data parallelism without FSDP: each process holds all parameters.

A model computes with copies of its parameters in another dtype, as with FSDP's MixedPrecisionPolicy, and processes sum
their gradients, without FSDP's work on the host for each layer and each parameter, which for small models takes longer
than their forward and backward pass.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from opslot._base.errors import ParallelError
from opslot.distributed.dtensors import local_tensor
from opslot.distributed.gradient_buckets import GradientBuckets
from opslot.distributed.module_dtypes import kept_in_float32

# A share of the device's memory.
_LITTLE = 0.05
_COPIES = "_mixed_precision_copies"
_NO_BACKWARD = -1


def takes_little_memory(size: int, device: torch.device, share: float = _LITTLE) -> bool:
    """Whether `size` bytes are at most this share of the memory of a GPU; always on other devices."""
    return device.type != "cuda" or size <= share * torch.cuda.get_device_properties(device).total_memory


def can_copy_parameters(parameters: Iterable[nn.Parameter], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether copies in `dtype` of the parameters that have another dtype take little of the memory of `device`."""
    size = sum(local_tensor(parameter).numel() for parameter in parameters if _is_cast(parameter, dtype))
    return takes_little_memory(size * dtype.itemsize, device)


def compute_with_copies(model: nn.Module, dtype: torch.dtype, modules: Collection[nn.Module] | None = None) -> None:
    """Let `model` compute with copies of its parameters in `dtype`, in place; not of those in `kept_in_float32`.

    During a forward pass and its backward pass, modules hold the copies; at all other times they hold the parameters,
    which the optimizer, checkpoints and exports see. Every forward pass copies the parameters' values again.
    Gradients are computed in `dtype`, and added to those of the parameters in the parameters' dtype. Floating-point
    inputs of the model are cast to `dtype`.

    Args:
        model: its parameters may be on meta until the first forward pass. Transformers models inside it, such as the
            base model, compute with the copies too when they are called alone.
        modules: those whose own parameters are copied; default all. The copy of a DTensor is a plain tensor, of the
            local part, and gradients are added as soon as they are computed: they are few and large.
    """
    _register(model, _Copies(model, dtype, modules=modules))


def replicate(
    model: nn.Module, dtype: torch.dtype | None, reduce_dtype: torch.dtype | None = torch.float32, overlap: bool = True
) -> None:
    """Let `model`, with the same parameters on every rank, train with gradients that are summed over all ranks.

    Computes with copies as `compute_with_copies`. Gradients that are not reduced yet (`gradient_sync`) are not among
    those of the parameters.

    Args:
        model: its parameters may be on meta until the first forward pass.
        dtype: of the computation; default the parameters'.
        reduce_dtype: in which gradients are summed, over backward passes and ranks; default that of the computation.
        overlap: reduce gradients during the backward pass. Off: after it, as beside other collectives in it.
    """
    _register(model, _Copies(model, dtype, functools.partial(GradientBuckets, dtype=reduce_dtype, overlap=overlap)))


def has_copies(model: nn.Module) -> bool:
    """Whether `compute_with_copies` or `replicate` was called for `model`."""
    return _COPIES in model.__dict__


def replicated_gradient_sync(model: nn.Module, enabled: bool) -> contextlib.AbstractContextManager[None]:
    """`gradient_sync` of a model on which `replicate` may have been called."""
    copies: _Copies | None = model.__dict__.get(_COPIES)
    return contextlib.nullcontext() if copies is None else copies.gradient_sync(enabled)


def release_copies(model: nn.Module) -> None:
    """Free the memory of the copies until the next forward pass."""
    if has_copies(model):
        model.__dict__[_COPIES].release()


def _register(model: nn.Module, copies: _Copies) -> None:
    model.__dict__[_COPIES] = copies
    for module in model.modules():
        if module is model or hasattr(module, "_no_split_modules"):
            module.register_forward_pre_hook(copies.begin_forward, with_kwargs=True)
            module.register_forward_hook(copies.end_forward, always_call=True)


class _Copies:
    """What a model computes with: copies of the parameters that have another dtype.

    Where ranks sum their gradients, also aliases of the other trained parameters, tensors with the same memory: theirs
    are the gradients of this rank, the parameters' those of all ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype | None,
        reduction: Callable[..., GradientBuckets] | None = None,
        modules: Collection[nn.Module] | None = None,
    ) -> None:
        self._model, self._dtype, self._reduction, self._modules = model, dtype, reduction, modules
        # Of the trained parameters; and whether the next backward pass reduces, and the last one did.
        self._buckets: GradientBuckets | None = None
        self._reduces, self._is_reduced = True, False
        # Where parameters are: a module's dict of parameters, name, parameter and copy.
        self._places: list[tuple[dict[str, Any], str, nn.Parameter, nn.Parameter]] = []
        self._copies: dict[nn.Parameter, nn.Parameter] = {}
        self._parameter_of: dict[Tensor, nn.Parameter] = {}
        self._without_copy: list[nn.Parameter] = []
        self._kept: set[Any] = set()
        self._guards: list[RemovableHandle] = []
        self._is_found = False
        # Modules that may be computed again in the backward pass.
        self._checkpointed: list[nn.Module] = []
        # The modules whose forward pass runs, one inside another; the backward pass that runs, and the one after which
        # gradients are moved.
        self._running: list[nn.Module] = []
        self._backward = self._moved_after = _NO_BACKWARD

    def __reduce__(self) -> tuple[Any, ...]:
        # A copied or loaded model makes its own.
        return _Copies, (self._model, self._dtype, self._reduction, self._modules)

    @contextlib.contextmanager
    def gradient_sync(self, enabled: bool) -> Iterator[None]:
        before, self._reduces, self._is_reduced = self._reduces, enabled, False
        try:
            yield
            if enabled and self._reduction is not None and not self._is_reduced:
                # This rank ran no backward pass, but others may have.
                self._find()
                self._finish_reduction()
        finally:
            self._reduces = before

    def begin_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if module in self._running:
            # KeyboardInterrupt ends a forward pass without its hooks.
            self._running.clear()
        if torch._C._current_graph_task_id() == _NO_BACKWARD:
            # The last backward pass may have raised, without resetting it.
            self._backward = _NO_BACKWARD
        self._running.append(module)
        if len(self._running) > 1 or self._in_backward():
            return None
        self._place_parameters()
        self._find()
        self._copy_values()
        self._place_copies()
        return None if self._dtype is None else pytree.tree_map_only(Tensor, self._cast, (args, kwargs))

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
        is_computed_again = any(getattr(module, "gradient_checkpointing", True) for module in self._checkpointed)
        if found and (is_computed_again or self._buckets is not None):
            register_multi_grad_hook(found, self._begin_backward, mode="any")

    @torch.inference_mode(False)  # A tensor that is made inside could not be trained outside.
    def _copy_of(self, parameter: nn.Parameter) -> nn.Parameter:
        if self._is_cast(parameter):
            copy = nn.Parameter(torch.empty_like(local_tensor(parameter), dtype=self._dtype))
        else:
            copy = nn.Parameter(parameter.detach())
        # The garbage collector does not see what a tensor's hook refers to: a method of this would keep the model.
        copy.register_post_accumulate_grad_hook(functools.partial(_call_after_gradient, weakref.ref(self)))
        copy.requires_grad_(parameter.requires_grad)
        return copy

    def _after_gradient(self, copy: Tensor) -> None:
        """Reduce the gradient, or move it to the parameter when the backward pass ends."""
        if self._buckets is not None:
            # A backward pass that starts at no output of the model has not begun here. One inside another, of a
            # checkpoint with `use_reentrant`, ends with the outer one.
            if self._backward == _NO_BACKWARD:
                self._begin_backward(copy)
            self._buckets.arrive(copy, self._reduces)
        elif self._modules is not None:
            self._move_gradients([copy])
        elif self._moved_after != (task := torch._C._current_graph_task_id()):
            self._moved_after = task
            torch.autograd.Variable._execution_engine.queue_callback(self._move_all_gradients)

    def _move_all_gradients(self) -> None:
        self._moved_after = _NO_BACKWARD
        self._move_gradients(self._parameter_of)

    @torch.no_grad()
    def _move_gradients(self, copies: Iterable[Tensor]) -> None:
        """Add the gradients of copies to those of the parameters, in the parameters' dtype."""
        new, computed = [], []
        for copy in copies:
            parameter = self._parameter_of[copy]
            if copy.grad is None:
                continue
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
                new.append(local_tensor(parameter.grad))
                computed.append(copy.grad)
            else:
                local_tensor(parameter.grad).add_(copy.grad)
            copy.grad = None
        if new:
            torch._foreach_copy_(new, computed)

    def _finish_reduction(self) -> None:
        if self._buckets is not None:
            self._buckets.finish(self._reduces)
        self._is_reduced = self._reduces

    def release(self) -> None:
        self._place_parameters()
        self._places, self._buckets, self._is_found = [], None, False
        self._copies, self._parameter_of = {}, {}
        self._without_copy, self._kept = [], set()
        for guard in self._guards:
            guard.remove()
        self._guards = []

    def _in_backward(self) -> bool:
        return self._backward != _NO_BACKWARD and self._backward == torch._C._current_graph_task_id()

    def _begin_backward(self, gradient: Tensor) -> None:
        """Place the copies again, for modules that are computed again."""
        if not self._in_backward():
            self._backward = torch._C._current_graph_task_id()
            self._place_copies()
            if self._buckets is not None:
                self._buckets.begin()
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        self._backward = _NO_BACKWARD
        self._place_parameters()
        self._finish_reduction()

    def _cast(self, x: Tensor) -> Tensor:
        return x.to(self._dtype) if x.is_floating_point() else x

    def _is_cast(self, parameter: nn.Parameter) -> bool:
        if self._dtype is None or (self._modules is None and isinstance(parameter, DTensor)):
            return False
        if parameter in self._kept:
            return False
        return _is_cast(parameter, self._dtype)

    def _find(self) -> None:
        """Find the parameters again if modules hold others than before, on another device, or trained or not."""
        if self._is_found and self._is_current():
            return
        self.release()
        self._is_found = True
        if self._dtype is not None:
            self._kept = {module._parameters[name] for module, name in kept_in_float32(self._model, self._dtype)}
        self._checkpointed = [
            m for m in self._model.modules() if hasattr(m, "gradient_checkpointing") or isinstance(m, CheckpointWrapper)
        ]
        for module in self._model.modules() if self._modules is None else self._modules:
            held: dict[str, Any] = module._parameters
            for name, parameter in held.items():
                if parameter is None:
                    continue
                is_reduced = self._reduction is not None and parameter.requires_grad
                if not is_reduced and not self._is_cast(parameter):
                    self._without_copy.append(parameter)
                    continue
                if parameter not in self._copies:
                    copy = self._copies[parameter] = self._copy_of(parameter)
                    self._parameter_of[copy] = parameter
                self._places.append((held, name, parameter, self._copies[parameter]))
        if self._reduction is not None:
            trained = [(copy, parameter) for parameter, copy in self._copies.items() if parameter.requires_grad]
            self._guards = [p.register_post_accumulate_grad_hook(_raise_not_reduced) for _, p in trained]
            self._buckets = self._reduction(trained)

    def _is_current(self) -> bool:
        if self._reduction is not None and any(parameter.requires_grad for parameter in self._without_copy):
            return False
        return all(
            held.get(name) is parameter and self._is_of(copy, parameter) for held, name, parameter, copy in self._places
        )

    def _is_of(self, copy: nn.Parameter, parameter: nn.Parameter) -> bool:
        """Whether a copy still serves its parameter."""
        if parameter.device != copy.device:
            return False
        if self._reduction is None:
            return True
        is_alias = parameter.dtype == copy.dtype
        return parameter.requires_grad == copy.requires_grad and (
            not is_alias or parameter.data_ptr() == copy.data_ptr()
        )

    @torch.no_grad()
    def _copy_values(self) -> None:
        copied = [(copy, parameter) for parameter, copy in self._copies.items() if copy.dtype != parameter.dtype]
        if copied:
            copies: tuple[Tensor, ...]
            copies, parameters = zip(*((copy, local_tensor(parameter)) for copy, parameter in copied), strict=True)
            # The graph of an earlier forward pass may still need the copies; the values are the same then.
            with torch.autograd._unsafe_preserve_version_counter(copies):
                torch._foreach_copy_(copies, parameters)
        for parameter, copy in self._copies.items():
            copy.requires_grad_(parameter.requires_grad)
            # A backward pass that raised may have left a gradient.
            copy.grad = None

    def _place_copies(self) -> None:
        for held, name, _, copy in self._places:
            held[name] = copy

    def _place_parameters(self) -> None:
        for held, name, parameter, copy in self._places:
            if held.get(name) is copy:
                held[name] = parameter


def _call_after_gradient(copies: weakref.ref[_Copies], copy: Tensor) -> None:
    found = copies()
    assert found is not None, "the model was deleted before the backward pass"
    found._after_gradient(copy)


def _raise_not_reduced(parameter: Tensor) -> None:
    """Hook of a parameter whose copy or alias should have got the gradient."""
    raise ParallelError(
        "a parameter got a gradient outside of the model's forward pass, which is not summed over the ranks",
        found=f"one of shape {tuple(parameter.shape)}, as where a loop of its own calls a layer, such as the head",
        hint="compute the loss in the model's forward, or set data_parallel_mode to fsdp2",
    )


def _is_cast(parameter: nn.Parameter, dtype: torch.dtype) -> bool:
    """Whether a parameter is copied: not quantized weights, and not those of a tensor subclass but DTensor."""
    if parameter.dtype == dtype or type(parameter) not in (nn.Parameter, DTensor):
        return False
    return parameter.is_floating_point() and parameter.itemsize > 1
