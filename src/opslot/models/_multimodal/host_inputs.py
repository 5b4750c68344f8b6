"""Forward passes without host-device synchronization.

Transformers' models look for packed documents in position_ids, and its vision-language models read image grids, token
ids and masks as Python integers (`tolist`, `item`) and as boolean indices (`nonzero`). On a GPU each of them waits for
the device. With `keep_inputs_on_host`, integer and boolean inputs stay on the host, where reading them costs nothing,
and are copied to the device, asynchronously, by the first operation that also needs a tensor of the device. It needs no
change of the model's code, so it works with every release.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from opslot._base.host_values import device_copy, remember_source

_FEATURES = ("get_image_features", "get_video_features", "get_audio_features")
_FACTORIES = (torch.tensor, torch.as_tensor)


def keep_inputs_on_host(model: nn.Module) -> nn.Module:
    """Let `model` take integer and boolean inputs on the CPU, whatever device its parameters are on.

    Layers (the modules in a `ModuleList`) get all their inputs on the device. Does nothing for a model that does so
    already, and in calls with all inputs on the device. Returns `model`.
    """
    if _mode_of(model) is not None:
        return model
    mode = _HostInputs()
    model.register_forward_pre_hook(mode.begin, with_kwargs=True)
    model.register_forward_hook(mode.end, always_call=True)
    for layer in _layers(model):
        layer.register_forward_pre_hook(mode.suspend, with_kwargs=True, prepend=True)
        layer.register_forward_hook(mode.resume, always_call=True)
    return model


def keep_inputs_from_fsdp(model: nn.Module) -> None:
    """Keep inputs on the host although FSDP moves the inputs of its root to the device; called after `fully_shard`."""
    mode = next((mode for module in model.modules() if (mode := _mode_of(module)) is not None), None)
    if mode is not None:
        model.register_forward_pre_hook(mode.remember, with_kwargs=True, prepend=True)


def map_inputs_of_compiled_layers(model: nn.Module) -> None:
    """Copy host inputs before the graphs of compiled layers, which cannot; called after `layer.compile()`."""
    mode = next((mode for module in model.modules() if (mode := _mode_of(module)) is not None), None)
    if mode is None:
        return
    for layer in model.modules():
        if layer._compiled_call_impl is not None and mode.suspend in layer._forward_pre_hooks.values():
            layer._compiled_call_impl = _mapping_inputs(mode, layer, layer._compiled_call_impl)


def _mapping_inputs(mode: _HostInputs, layer: nn.Module, compiled: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = mode.suspend(layer, args, kwargs) or (args, kwargs)
        try:
            return compiled(*args, **kwargs)
        finally:
            mode.resume()

    return call


def reads_host_inputs(model: nn.Module) -> bool:
    """Whether a model, which may be in a wrapper, reads image grids, token ids or masks to place features of images."""
    return any(hasattr(type(module), name) for module in model.modules() for name in _FEATURES)


def _mode_of(model: nn.Module) -> _HostInputs | None:
    owners = (getattr(hook, "__self__", None) for hook in model._forward_pre_hooks.values())
    return next((owner for owner in owners if isinstance(owner, _HostInputs)), None)


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    """The modules in the outermost `ModuleList`s."""
    for child in model.children():
        yield from child.children() if isinstance(child, nn.ModuleList) else _layers(child)


# A model passes the same tensors to every layer. A copy also refers to its source, so entries are removed after each
# forward pass; those of layers computed again in backward, before the next.
_copies: Any = WeakIdKeyDictionary()


def _to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy that later work on the device waits for, and the host does not."""
    known = _copies.get(tensor)
    if known is not None and known[0] == (device, tensor._version):
        return known[1]
    copy = device_copy(tensor, device)
    _copies[tensor] = ((device, tensor._version), copy)
    remember_source(copy, tensor)
    return copy


class _HostInputs(TorchFunctionMode):
    """Moves host tensors to the device when an operation mixes both."""

    def __init__(self) -> None:
        super().__init__()
        self._device: torch.device | None = None
        self._suspended: list[bool] = []
        self._threads = 1
        self._given: Any = None

    def remember(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        self._given = (args, kwargs)

    def begin(self, model: nn.Module, args: Any, kwargs: Any) -> Any:
        """Forward pre-hook: with integer inputs on the host, those that FSDP moved to the device too."""
        device = next(p.device for p in model.parameters())
        given, self._given = self._given or (args, kwargs), None
        on_host = any(map(_is_host_integer, _tensors(given)))
        if not on_host or device.type == "cpu" or self._device is not None:
            return None
        if torch.compiler.is_compiling():
            # The whole model is one graph, which the copies are part of.
            return _mapped(args, device, Tensor.to), _mapped(kwargs, device, Tensor.to)
        self._device = device
        _copies.clear()
        # Host tensors are too small for several threads, which wait for each other while other processes use the cores.
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)
        self.__enter__()
        return args, kwargs | {name: x for name, x in given[1].items() if name in kwargs and _is_host_integer(x)}

    def end(self, *_: Any) -> None:
        if self._device is not None:
            self._device = None
            _copies.clear()
            torch.set_num_threads(self._threads)
            self.__exit__(None, None, None)

    def suspend(self, layer: nn.Module, args: Any, kwargs: Any) -> Any:
        """Forward pre-hook of a layer. In a compiled layer `map_inputs_of_compiled_layers` has called it before."""
        if torch.compiler.is_compiling():
            return None
        # Not active when a layer is computed again in backward.
        active = self._device is not None and not (self._suspended and self._suspended[-1])
        self._suspended.append(active)
        if active:
            self.__exit__(None, None, None)
        # Without the mode, which intercepts every access to `device`.
        device = next((p.device for p in layer.parameters()), None)
        if device is None or device.type == "cpu":
            return None
        return _mapped(args, device), _mapped(kwargs, device)

    def resume(self, *_: Any) -> None:
        if not torch.compiler.is_compiling() and self._suspended.pop():
            self.__enter__()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _has_no_host_tensor(args) and _has_no_host_tensor(kwargs.values()) and function not in _FACTORIES:
            return function(*args, **kwargs)
        if function is Tensor.to and _on_host(args[0]):
            # Stays on the host until an operation needs it on the device.
            args = [args[0], *(a for a in args[1:] if not isinstance(a, torch.device | str))]
            kwargs = {name: value for name, value in kwargs.items() if name not in ("device", "non_blocking")}
            if len(args) > 1 and isinstance(args[1], Tensor):
                args[1] = args[1].dtype
            return function(*args, **kwargs) if len(args) > 1 or kwargs else args[0]
        if function is Tensor.expand_as and _on_host(args[0]):
            # Of the other tensor it only takes the shape.
            return args[0].expand(args[1].shape)
        if function in _FACTORIES and kwargs.get("device") is not None:
            return function(*args, **{**kwargs, "device": "cpu"})
        if function is Tensor.masked_scatter and _on_host(args[1]) and not _on_host(args[0]):
            return _masked_scatter(*args)
        if function is Tensor.__getitem__ and not _on_host(args[0]):
            rows = _rows_of_index(args[0], args[1])
            if rows is not None:
                return function(args[0], _mapped(rows.nonzero(as_tuple=True), args[0].device)).flatten()
        if function in (Tensor.__getitem__, Tensor.__setitem__) and not _on_host(args[0]):
            args = (args[0], _integer_index(args[1]), *args[2:])
        device = next((t.device for t in _tensors((args, kwargs)) if t.device.type != "cpu"), None)
        if device is not None:
            args, kwargs = _mapped(args, device), _mapped(kwargs, device)
        return function(*args, **kwargs)


def _has_no_host_tensor(values: Iterable[Any]) -> bool:
    """Whether no value is a tensor on the host, or may hold one, as in most calls."""
    for value in values:
        if isinstance(value, Tensor):
            if value.is_cpu:
                return False
        elif isinstance(value, list | tuple | Mapping):
            return False
    return True


def _on_host(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "cpu"


def _is_host_integer(value: Any) -> bool:
    return _on_host(value) and not value.is_floating_point()


def _rows_of(mask: Tensor) -> Tensor | None:
    """A mask [..., H] that was expanded over H, without H; None for another."""
    return mask[..., 0] if mask.ndim > 1 and mask.stride(-1) == 0 else None


def _rows_of_index(tensor: Tensor, index: Any) -> Tensor | None:
    """`_rows_of` a mask of the host that selects single elements of `tensor`; None for another index."""
    selects_elements = _on_host(index) and index.dtype == torch.bool and index.ndim == tensor.ndim
    return _rows_of(index) if selects_elements else None


def _integer_index(index: Any) -> Any:
    """`index` with the boolean masks of the host as integers, which need no synchronization."""
    if _on_host(index) and index.dtype == torch.bool:
        return index.nonzero(as_tuple=True)
    if isinstance(index, tuple) and index and _on_host(index[0]) and index[0].dtype == torch.bool:
        return (*index[0].nonzero(as_tuple=True), *index[1:])
    return index


def _masked_scatter(tensor: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """`tensor.masked_scatter(mask, source)`, whose gradient needs no synchronization either."""
    mask = mask.expand_as(tensor)
    rows = _rows_of(mask)
    index = (mask if rows is None else rows).nonzero(as_tuple=True)
    values = source.reshape(-1, *tensor.shape[len(index) :])[: index[0].numel()]
    index = tuple(_to_device(i, tensor.device) for i in index)
    return tensor.index_put(index, values.to(tensor.dtype))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))


def _mapped(value: Any, device: torch.device, copy: Callable[[Tensor, torch.device], Tensor] = _to_device) -> Any:
    """`value` with the tensors of the host on `device`; numbers (without dimensions) may stay."""
    if isinstance(value, Tensor):
        return copy(value, device) if value.device.type == "cpu" and value.ndim else value
    if type(value) in (list, tuple):
        return type(value)([_mapped(item, device, copy) for item in value])
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*[_mapped(item, device, copy) for item in value])
    if type(value) is dict:
        return {name: _mapped(item, device, copy) for name, item in value.items()}
    return value
