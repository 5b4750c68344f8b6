"""Activation checkpointing: which activations the backward pass finds in memory, recomputes, or copies from the host.

- full: of each layer, its input is kept and everything else is recomputed.
- selective: outputs of matmuls and attention are kept too (`is_saved`), so only cheap ops are recomputed.
- With offload, the inputs of layers are copied to pinned host memory during the forward pass, and back during the
  backward pass, one layer ahead.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import FSDPModule
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from opslot._base.errors import ConfigError
from opslot.distributed.running_statistics import update_statistics_once

CheckpointingMode = Literal["none", "full", "selective"]
MODES: tuple[CheckpointingMode, ...] = ("none", "full", "selective")

# Not bmm: eager attention's scores are one.
_MATMULS = r"(mm|addmm|linear|_scaled_mm|_grouped_mm|_scaled_grouped_mm)"
_SAVED = re.compile(
    rf"(aten::{_MATMULS}"
    r"|aten::_(scaled_dot_product|flash|efficient)_\w*attention\w*"
    r"|opslot::(attention|flash_attention_4|moe_\w+|chunk_gated_delta_rule|mamba_chunk_scan)"
    r"|opslot::(batch_invariant|aligned)_linear"
    r"|flash_attn\w*::\w*)"
)
# A smaller tensor is not worth a copy.
_SMALLEST = 2**14


def is_saved(op_name: str) -> bool:
    """Whether selective checkpointing keeps the outputs of an op, such as "aten::mm"."""
    return _SAVED.fullmatch(op_name) is not None and not op_name.endswith("backward")


def checkpoint_activations(
    model: nn.Module, mode: CheckpointingMode | bool, offload: bool = False, dtype: torch.dtype | None = None
) -> None:
    """Checkpoint the layers of a Transformers model.

    Args:
        mode: True is full, False none.
        offload: copy the inputs of layers to host memory.
        dtype: that FSDP casts the inputs of layers to.

    Raises:
        ConfigError: an unknown mode, `offload` without checkpointing, or a model that cannot be checkpointed.
    """
    if isinstance(mode, bool):
        mode = "full" if mode else "none"
    if mode not in MODES:
        raise ConfigError(f"unknown activation_checkpointing={mode!r}", hint=f"use one of {', '.join(MODES)}")
    if mode == "none":
        if offload:
            raise ConfigError(
                "activation_offload copies the inputs of checkpointed layers, and activation_checkpointing is none",
                hint="set activation_checkpointing to full or selective",
            )
        return
    enable = getattr(model, "activation_checkpointing_enable", None) or getattr(
        model, "gradient_checkpointing_enable", None
    )
    if enable is None:
        raise ConfigError(
            f"activation_checkpointing needs a Transformers model, not {type(model).__name__}",
            hint="wrap its layers in torch's checkpoint_wrapper before parallelize",
        )
    enable({"use_reentrant": False})
    options: dict[str, Any] = {"use_reentrant": False}
    if mode == "selective":
        # Transformers adds the biases of experts to the output of a grouped GEMM in place, which must not be kept.
        in_place = any(getattr(module, "has_bias", False) is True for module in model.modules())
        policy = functools.partial(_policy, frozenset({"aten::_grouped_mm"} if in_place else ()))
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, policy)
    function: Callable[..., Any] = functools.partial(checkpoint, **options)
    if dtype is not None:
        function = functools.partial(_cast_inputs, function, dtype)
    if offload:
        function = _Offloaded(function)
    for module in model.modules():
        if hasattr(module, "_gradient_checkpointing_func"):
            module.__dict__["_gradient_checkpointing_func"] = function
    update_statistics_once(model)


def _cast_inputs(
    function: Callable[..., Any], dtype: torch.dtype, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Call `function`, a checkpoint, with the inputs of an FSDP module in the dtype that FSDP casts them to.

    Releases of Transformers before 5.23 checkpoint a layer around FSDP's hooks, which before torch 2.13 cast the inputs
    in the forward pass, but not when it is recomputed.
    """
    inner, given = (forward.func, forward.keywords) if isinstance(forward, functools.partial) else (forward, {})
    if isinstance(getattr(inner, "__self__", None), FSDPModule):
        args, kwargs, given = pytree.tree_map_only(
            Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, (args, kwargs, given)
        )
        forward = functools.partial(inner, **given)
    return function(forward, *args, **kwargs)


def _policy(recomputed: frozenset[str], context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = op._schema.name
    is_kept = name not in recomputed and is_saved(name)
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def keep_fsdp_from_checkpoints(model: nn.Module) -> None:
    """Hide what FSDP's hooks do from selective checkpoints, which FSDP's groups inside of layers run in.

    When a layer is recomputed, its inner groups may be gathered already or not, so their hooks call other ops than in
    the forward pass, and from torch 2.13 on a selective checkpoint raises for an op that it has not seen there.
    """
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        state = module._get_fsdp_state()
        tables: tuple[dict[int, Any], ...] = (module._forward_pre_hooks, module._forward_hooks)
        for hooks in tables:
            own = {key: hook for key, hook in hooks.items() if getattr(hook, "__self__", None) is state}
            hooks.update({key: functools.partial(_without_modes, hook) for key, hook in own.items()})


@torch.compiler.disable
def _without_modes(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _disable_current_modes():
        return function(*args, **kwargs)


class _Copy:
    """A tensor in host memory.

    Attributes:
        before: the copy made before this one, which the backward pass needs after it.
        on_device: the tensor, once its copy back has started.
        done: when the last copy that was started is complete.
    """

    def __init__(self, tensor: Tensor, before: _Copy | None) -> None:
        self.before = before
        self.device = tensor.device
        self.on_device: Tensor | None = None
        self.done: Any = None
        self.host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.device.type == "cuda")
        with _beside(self.device) as stream:
            self.host.copy_(tensor, non_blocking=True)
            if stream is not None:
                # Its memory must not be reused before the copy.
                tensor.record_stream(stream)
                self.done = stream.record_event()

    def fetch(self) -> None:
        """Start the copy back, unless it has started."""
        if self.on_device is None:
            with _beside(self.device) as stream:
                self.on_device = self.host.to(self.device, non_blocking=True)
                if stream is not None:
                    self.done = stream.record_event()

    def take(self) -> Tensor:
        self.fetch()
        tensor, self.on_device = self.on_device, None
        assert tensor is not None, "fetch sets it"
        if self.done is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(self.done)
            tensor.record_stream(current)
        return tensor


class _Offloaded:
    """`checkpoint`, with what it saves in host memory until the backward pass, which reads it in the reverse order."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._last: _Copy | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with saved_tensors_hooks(self._pack, self._unpack):
            return self._function(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Offloaded, (self._function,)

    def _pack(self, tensor: Tensor) -> Tensor | _Copy:
        if isinstance(tensor, nn.Parameter) or not tensor.is_floating_point() or tensor.numel() < _SMALLEST:
            return tensor
        self._last = _Copy(tensor, self._last)
        return self._last

    def _unpack(self, saved: Tensor | _Copy) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        tensor, before = saved.take(), saved.before
        saved.before = None
        if before is None:
            self._last = None
        else:
            before.fetch()
        return tensor


_STREAMS: dict[torch.device, Any] = {}


@contextlib.contextmanager
def _beside(device: torch.device) -> Iterator[Any]:
    """Inside, copies run on a separate stream, after what is queued on the current one; None on a CPU."""
    if device.type != "cuda":
        yield None
        return
    stream = _STREAMS.get(device) or _STREAMS.setdefault(device, torch.cuda.Stream(device))
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield stream
