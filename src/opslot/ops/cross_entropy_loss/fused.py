"""The fused kernels: argument checks, custom ops and autograd around `chunked`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import functional as F

from opslot._base.host_values import device_copy
from opslot.ops._common.arguments import reject
from opslot.ops._common.custom_op import custom_op, once_differentiable
from opslot.ops.cross_entropy_loss.chunked import (
    Backend,
    Shaping,
    gradient_dtype,
    loss_and_gradients,
    loss_dtype,
    token_gradients,
    tokens,
)

_INPUTS = "Tensor hidden, Tensor weight, Tensor? bias, Tensor labels"
_SHAPING = "int ignore_index, float smoothing, float cap, float scale"
_WANTED = "bool want_hidden, bool want_weight, bool want_bias"

ShapingArguments = tuple[int, float, float, float]


@dataclass(frozen=True)
class Kernels:
    """One backend's kernels, one per variant of the op."""

    causal: Callable[..., Tensor]
    sequence_classification: Callable[..., Tensor]
    token_log_probs: Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class _Ops:
    """One backend's custom ops, and the properties that their callers need."""

    loss: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]
    tokens: Callable[..., tuple[Tensor, Tensor]]
    token_gradients: Callable[..., tuple[Tensor, Tensor, Tensor]]
    rescale: Callable[[Tensor, Tensor], None]
    unsupported: Callable[[Tensor], str | None]


# By name of the backend, which is passed to autograd functions, since torch.compile supports strings there.
_OPS: dict[str, _Ops] = {}


def make_kernels(backend: Backend) -> Kernels:
    """The backend's kernels; defines its custom ops, so it is called once per backend."""
    name = backend.name
    _OPS[name] = _Ops(_loss_op(backend), *_token_ops(backend), backend.rescale, backend.unsupported)

    def causal(
        hidden_states: Tensor,
        weight: Tensor,
        labels: Tensor,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        *,
        bias: Tensor | None = None,
        label_smoothing: float = 0.0,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        **kwargs: Any,
    ) -> Tensor:
        if shift_labels is None:
            shift_labels = shifted(labels, ignore_index)
        shaping = (ignore_index, float(label_smoothing), *_shape(name, softcap, logit_scale))
        return _loss(name, hidden_states, weight, bias, shift_labels, num_items_in_batch, shaping)

    def sequence_classification(
        hidden_states: Tensor,
        weight: Tensor,
        labels: Tensor,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        *,
        bias: Tensor | None = None,
        label_smoothing: float = 0.0,
        **kwargs: Any,
    ) -> Tensor:
        shaping = (ignore_index, float(label_smoothing), 0.0, 1.0)
        return _loss(name, hidden_states, weight, bias, labels, num_items_in_batch, shaping)

    def token_log_probs(
        hidden_states: Tensor,
        weight: Tensor,
        labels: Tensor,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        *,
        bias: Tensor | None = None,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        if shift_labels is None:
            shift_labels = shifted(labels, ignore_index)
        shaping = (ignore_index, 0.0, *_shape(name, softcap, logit_scale))
        flat = _served(name, *flat_inputs(name, hidden_states, weight, bias, shift_labels))
        log_probs, entropy = _TokenLogProbs.apply(name, *flat, *shaping)
        return log_probs.view(shift_labels.shape), entropy.view(shift_labels.shape)

    return Kernels(causal, sequence_classification, token_log_probs)


def _shape(name: str, softcap: float | None, logit_scale: float) -> tuple[float, float]:
    """Both as numbers; rejects tensors that require a gradient, which would be lost."""
    for argument, value in (("softcap", softcap), ("logit_scale", logit_scale)):
        if isinstance(value, Tensor) and value.requires_grad:
            _reject(name, argument, "it requires a gradient, and only hidden_states and weight receive one")
    return float(softcap or 0.0), float(logit_scale)


def shifted(labels: Tensor, ignore_index: int) -> Tensor:
    """Labels of the next position; the last position of a sequence gets `ignore_index`."""
    return F.pad(labels, (0, 1), value=ignore_index)[..., 1:]


Flat = tuple[Tensor, Tensor, Tensor | None, Tensor]


def flat_inputs(name: str, hidden_states: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> Flat:
    """([N, H], [V, H], [V] or None, [N] int64) on one device, all but the last in one dtype: autocast's where it is on.

    Raises:
        KernelError: shapes, dtypes or devices do not fit together.
    """
    device = hidden_states.device
    if device.type == "meta":
        _reject(name, "hidden_states", "it is on meta, where tensors have no data")
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
        hidden_states, weight = hidden_states.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    if not hidden_states.dim():
        _reject(name, "hidden_states", "it is one number, not [..., H]")
    width = hidden_states.shape[-1]
    if weight.dim() != 2 or weight.shape[1] != width:
        _reject(
            name, "weight", f"shape {tuple(weight.shape)} beside hidden_states {tuple(hidden_states.shape)}, not [V, H]"
        )
    if not weight.shape[0]:
        _reject(name, "weight", f"shape {tuple(weight.shape)}, a vocabulary of nothing")
    if hidden_states.shape[:-1].numel() != labels.numel():
        _reject(name, "labels", f"shape {tuple(labels.shape)} beside hidden_states {tuple(hidden_states.shape)}")
    if hidden_states.dtype != weight.dtype:
        _reject(name, "weight", f"{weight.dtype} beside hidden_states of {hidden_states.dtype} without torch.autocast")
    if device != weight.device:
        _reject(name, "weight", f"it is on {weight.device}, hidden_states on {device}")
    if bias is not None and (bias.shape, bias.dtype, bias.device) != (weight.shape[:1], weight.dtype, device):
        found = f"{bias.dtype} of shape {tuple(bias.shape)} on {bias.device}"
        _reject(name, "bias", f"{found} beside weight {weight.dtype} of shape {tuple(weight.shape)} on {device}")
    if labels.is_floating_point() or labels.dtype == torch.bool:
        _reject(name, "labels", f"{labels.dtype}, not integer class indices")
    if labels.device != device:
        labels = device_copy(labels, device)
    # Kernels require contiguous labels.
    flat = labels.reshape(-1).to(torch.int64).contiguous()
    return hidden_states.reshape(-1, width), weight, bias, flat


def loss_divisor(
    name: str, labels: Tensor, num_items: Tensor | int | None, ignore_index: int, dtype: torch.dtype
) -> Tensor:
    """The divisor of the summed loss: a 0-d tensor on the labels' device, without a synchronization."""
    if num_items is None:
        return (labels != ignore_index).sum().to(dtype)
    if not isinstance(num_items, Tensor):
        if isinstance(num_items, str | list | tuple):
            _reject(name, "num_items_in_batch", f"{num_items!r}, not one number")
        return torch.full((), num_items, dtype=dtype, device=labels.device)
    if num_items.numel() != 1:
        _reject(name, "num_items_in_batch", f"shape {tuple(num_items.shape)}, not one number")
    if num_items.requires_grad:
        _reject(name, "num_items_in_batch", "it requires a gradient, and only hidden_states and weight receive one")
    if num_items.device != labels.device:
        num_items = device_copy(num_items, labels.device)
    return num_items.reshape(()).to(dtype)


def _served(name: str, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> Flat:
    reason = _OPS[name].unsupported(hidden)
    if reason:
        _reject(name, "hidden_states", reason)
    return hidden, weight, bias, labels


def _reject(name: str, argument: str, found: str) -> NoReturn:
    field = "cross_entropy_loss_implementation"
    reject(f"{field}={name!r}", argument, found, f"fix the argument, or set {field} to 'eager'")


def _loss(
    name: str,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    num_items: Tensor | int | None,
    shaping: ShapingArguments,
) -> Tensor:
    hidden, weight, bias, labels = _served(name, *flat_inputs(name, hidden_states, weight, bias, labels))
    if not 0.0 <= shaping[1] <= 1.0:
        _reject(name, "label_smoothing", f"{shaping[1]}, not between 0 and 1")
    divisor = loss_divisor(name, labels, num_items, shaping[0], loss_dtype(hidden.dtype))
    recording = torch.is_grad_enabled()
    wanted = tuple(recording and x is not None and x.requires_grad for x in (hidden, weight, bias))
    if any(wanted):
        return _LinearCrossEntropy.apply(name, hidden, weight, bias, labels, divisor, *shaping, *wanted)
    return _OPS[name].loss(hidden, weight, bias, labels, divisor, *shaping, *wanted)[0]


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str, hidden: Tensor, *arguments: Any) -> Tensor:
        loss, *gradients = _OPS[name].loss(hidden, *arguments)
        ctx.save_for_backward(*gradients)
        ctx.name, ctx.dtype, ctx.wanted = name, hidden.dtype, arguments[-3:]
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        gradients = [
            _times(ctx.name, grad, grad_output).to(ctx.dtype) if wanted else None
            for grad, wanted in zip(ctx.saved_tensors, ctx.wanted, strict=True)
        ]
        return None, *gradients, *[None] * 9


def _times(name: str, grad: Tensor, factor: Tensor) -> Tensor:
    """`grad * factor`, in place if `grad` is not used again, since the weight's gradient is the largest tensor."""
    if torch.compiler.is_compiling() or torch._C._autograd._get_current_graph_task_keep_graph():
        return grad * factor
    _OPS[name].rescale(grad, factor)
    return grad


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, name: str, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, *shaping: Any
    ) -> tuple[Tensor, Tensor]:
        log_probs, entropy = _OPS[name].tokens(hidden, weight, bias, labels, *shaping)
        ctx.save_for_backward(hidden, weight, bias, labels, entropy)
        ctx.name, ctx.shaping = name, shaping
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs: Tensor, grad_entropy: Tensor) -> Any:
        wanted = ctx.needs_input_grad[1:4]
        op = _OPS[ctx.name].token_gradients
        found = op(*ctx.saved_tensors, grad_log_probs, grad_entropy, *ctx.shaping, *wanted)
        return None, *(grad if wants else None for grad, wants in zip(found, wanted, strict=True)), *[None] * 5


def _empty_grads(
    hidden: Tensor, weight: Tensor, dtype: torch.dtype, want_hidden: bool, want_weight: bool, want_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.empty(hidden.shape if want_hidden else 0, dtype=dtype, device=hidden.device),
        torch.empty_like(weight, dtype=dtype) if want_weight else weight.new_empty(0, dtype=dtype),
        weight.new_empty(weight.shape[0] if want_bias else 0, dtype=dtype),
    )


def _loss_op(backend: Backend) -> Callable[..., Any]:
    def loss(
        hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, divisor: Tensor, *rest: Any
    ) -> tuple[Tensor, ...]:
        with torch.autocast(hidden.device.type, enabled=False):
            return loss_and_gradients(backend, hidden, weight, bias, labels, divisor, Shaping(*rest[:-3]), rest[-3:])

    def fake(
        hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, divisor: Tensor, *rest: Any
    ) -> tuple[Tensor, ...]:
        return divisor.new_empty(()), *_empty_grads(hidden, weight, gradient_dtype(hidden.dtype), *rest[-3:])

    arguments = f"{_INPUTS}, Tensor divisor, {_SHAPING}, {_WANTED}"
    schema = f"linear_cross_entropy_{backend.name}({arguments}) -> (Tensor, Tensor, Tensor, Tensor)"
    return custom_op(schema, loss, fake)


def _token_ops(backend: Backend) -> tuple[Callable[..., Any], Callable[..., Any]]:
    def forward(
        hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, *shaping: Any
    ) -> tuple[Tensor, Tensor]:
        with torch.autocast(hidden.device.type, enabled=False):
            return tokens(backend, hidden, weight, bias, labels, Shaping(*shaping))

    def forward_fake(
        hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, *shaping: Any
    ) -> tuple[Tensor, Tensor]:
        dtype = loss_dtype(hidden.dtype)
        return torch.empty_like(labels, dtype=dtype), torch.empty_like(labels, dtype=dtype)

    def backward(
        hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, *rest: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        (entropy, grad_log_probs, grad_entropy), shaping, wanted = rest[:3], rest[3:-3], rest[-3:]
        rows = labels, entropy, grad_log_probs, grad_entropy
        with torch.autocast(hidden.device.type, enabled=False):
            return token_gradients(backend, hidden, weight, bias, *rows, Shaping(*shaping), wanted)

    def backward_fake(
        hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, *rest: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        return _empty_grads(hidden, weight, hidden.dtype, *rest[-3:])

    per_row = "Tensor entropy, Tensor grad_log_probs, Tensor grad_entropy"
    name, backward_name = f"token_log_probs_{backend.name}", f"token_log_probs_{backend.name}_backward"
    gradients = f"{_INPUTS}, {per_row}, {_SHAPING}, {_WANTED}"
    return (
        custom_op(f"{name}({_INPUTS}, {_SHAPING}) -> (Tensor, Tensor)", forward, forward_fake),
        custom_op(f"{backward_name}({gradients}) -> (Tensor, Tensor, Tensor)", backward, backward_fake),
    )
