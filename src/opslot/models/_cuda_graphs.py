"""Layers as CUDA graphs: `torch.compile(mode="reduce-overhead")` of each layer.

A graph replays the kernels of a layer, forward or backward, without the host's work for each of them. It is recorded
again for other shapes and other integers, so the documents of a packed batch are passed in shapes that seldom change.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from opslot._base.errors import ConfigError
from opslot._base.tensor_cache import TensorCache
from opslot.distributed.mixed_precision import has_copies
from opslot.ops.attention.layout import Layout
from opslot.slots.protocol import modules_by_document

_FEWEST_BOUNDARIES = 16
# The tensors of a batch: the boundaries of queries and of keys, and those of the masks.
_padded: TensorCache[Tensor] = TensorCache(8)


def prepare_cuda_graphs(model: nn.Module) -> None:
    """Prepare a model whose layers are compiled with mode="reduce-overhead"; each forward pass begins a step."""
    by_document = next((path for path, _ in modules_by_document(model)), None)
    copies: dict[nn.Parameter, weakref.ref[Tensor]] = {}
    model.register_forward_pre_hook(functools.partial(_begin_step, by_document, copies), with_kwargs=True)
    for layer in model.modules():
        if layer._compiled_call_impl is not None:
            layer._compiled_call_impl = _with_static_documents(layer._compiled_call_impl)


def _begin_step(
    by_document: str | None,
    copies: dict[nn.Parameter, weakref.ref[Tensor]],
    model: nn.Module,
    args: Any,
    kwargs: dict[str, Any],
) -> None:
    """Mark the memory of the last step's graphs as free, after what is needed of it has moved.

    Args:
        by_document: a module that runs once for each document.
        copies: the gradients that have moved.

    Raises:
        ConfigError: packed documents for a model with a module that runs once for each of them.
    """
    if by_document is not None and kwargs.get("cu_seq_lens_q") is not None:
        raise ConfigError(
            "cuda_graphs: packed documents need a graph for each of their lengths",
            found=f"{by_document} runs once for each document",
            hint="set packing off, or compile instead of cuda_graphs",
        )
    if torch.is_grad_enabled() and not has_copies(model):
        for parameter in model.parameters():
            # Of an earlier micro batch: the first one's is in a graph's memory, and later ones are added to its copy.
            copy = copies.get(parameter)
            if parameter.grad is not None and (copy is None or copy() is not parameter.grad):
                parameter.grad = parameter.grad.clone()
                copies[parameter] = weakref.ref(parameter.grad)
    torch.compiler.cudagraph_mark_step_begin()


def _with_static_documents(compiled: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        states = next((x for x in (*args, *kwargs.values()) if _is_hidden_states(x)), None)
        if states is None:
            return compiled(*args, **kwargs)
        length = states.shape[1]
        args = tuple([_static_layout(x, length) for x in args])
        return compiled(*args, **{name: _static(name, x, length) for name, x in kwargs.items()})

    return call


def _is_hidden_states(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and x.dim() > 2


def _static(name: str, x: Any, length: int) -> Any:
    if name.startswith("cu_seq_lens") and isinstance(x, Tensor):
        return pad_boundaries(x)
    if name.startswith("max_length") and x is not None:
        return length
    return _static_layout(x, length)


def _static_layout(x: Any, length: int) -> Any:
    if isinstance(x, Layout) and x.cu_seqlens is not None:
        return x._replace(cu_seqlens=pad_boundaries(x.cu_seqlens), longest=length)
    if isinstance(x, dict):
        return {name: _static_layout(value, length) for name, value in x.items()}
    return x


def pad_boundaries(cu_seqlens: Tensor) -> Tensor:
    """`cu_seqlens` [documents + 1] with documents of no tokens at the end, so that their number is a power of two."""
    count = len(cu_seqlens)
    size = max(_FEWEST_BOUNDARIES, 1 << (count - 1).bit_length())

    def pad() -> Tensor:
        return torch.cat((cu_seqlens, cu_seqlens[-1:].expand(size - count)))

    return _padded.get(cu_seqlens, pad)
