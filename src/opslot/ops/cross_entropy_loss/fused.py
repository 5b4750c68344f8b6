"""The fused kernels with the contract's signatures: argument checks, custom ops and autograd around `chunked`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from opslot._base.errors import KernelError, explain_problem
from opslot.ops.cross_entropy_loss.chunked import (
    Backend,
    Shaping,
    gradient_dtype,
    loss_and_gradients,
    token_gradients,
    tokens,
    wide,
)

_BACKENDS: dict[str, Backend] = {}
_SHAPING = "int ignore_index, float smoothing, float cap, float scale"
_WANTED = "bool want_hidden, bool want_weight"

ShapingArguments = tuple[int, float, float, float]


@dataclass(frozen=True)
class Kernels:
    """One backend's kernels, one per variant of the op."""

    causal: Callable[..., Tensor]
    sequence_classification: Callable[..., Tensor]
    token_log_probs: Callable[..., tuple[Tensor, Tensor]]


def make_kernels(backend: Backend) -> Kernels:
    """The backend's kernels; defines its custom ops, so it is called once per backend."""
    name = backend.name
    _BACKENDS[name] = backend
    _define_loss_op(backend)
    _define_token_ops(backend)

    def causal(
        hidden_states: Tensor,
        weight: Tensor,
        labels: Tensor,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        *,
        label_smoothing: float = 0.0,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        **kwargs: Any,
    ) -> Tensor:
        if shift_labels is None:
            shift_labels = shifted(labels, ignore_index)
        shaping = (ignore_index, float(label_smoothing), float(softcap or 0.0), float(logit_scale))
        return _loss(name, hidden_states, weight, shift_labels, num_items_in_batch, shaping)

    def sequence_classification(
        hidden_states: Tensor,
        weight: Tensor,
        labels: Tensor,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        *,
        label_smoothing: float = 0.0,
        **kwargs: Any,
    ) -> Tensor:
        shaping = (ignore_index, float(label_smoothing), 0.0, 1.0)
        return _loss(name, hidden_states, weight, labels, num_items_in_batch, shaping)

    def token_log_probs(
        hidden_states: Tensor,
        weight: Tensor,
        labels: Tensor,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        *,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        if shift_labels is None:
            shift_labels = shifted(labels, ignore_index)
        shaping = (ignore_index, 0.0, float(softcap or 0.0), float(logit_scale))
        flat = flat_inputs(name, hidden_states, weight, shift_labels)
        log_probs, entropy = _TokenLogProbs.apply(name, *flat, *shaping)
        return log_probs.view(shift_labels.shape), entropy.view(shift_labels.shape)

    return Kernels(causal, sequence_classification, token_log_probs)


def shifted(labels: Tensor, ignore_index: int) -> Tensor:
    """Labels of the next position; the last position of a sequence gets `ignore_index`."""
    return F.pad(labels, (0, 1), value=ignore_index)[..., 1:]


def flat_inputs(name: str, hidden_states: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """([N, H], [V, H], [N] int64) on one device, the first two in one dtype: autocast's where it is on.

    Raises:
        KernelError: shapes, dtypes or devices do not fit together.
    """
    device = hidden_states.device
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
        hidden_states, weight = hidden_states.to(dtype), weight.to(dtype)
    width = hidden_states.shape[-1]
    if weight.dim() != 2 or weight.shape[1] != width:
        shapes = f"hidden_states of shape {tuple(hidden_states.shape)}, weight of shape {tuple(weight.shape)}"
        _refuse(name, shapes, "hidden_states [..., H] and weight [V, H]")
    if hidden_states.shape[:-1].numel() != labels.numel():
        shapes = f"hidden_states of shape {tuple(hidden_states.shape)}, labels of shape {tuple(labels.shape)}"
        _refuse(name, shapes, "one label for each row of hidden_states")
    if hidden_states.dtype != weight.dtype:
        _refuse(
            name,
            f"hidden_states of {hidden_states.dtype}, weight of {weight.dtype}",
            "one dtype, or use torch.autocast",
        )
    if device != weight.device:
        _refuse(name, f"hidden_states on {device}, weight on {weight.device}", "both on one device")
    if labels.is_floating_point():
        _refuse(name, f"labels of {labels.dtype}", "class indices, an integer tensor")
    return hidden_states.reshape(-1, width), weight, labels.reshape(-1).to(device=device, dtype=torch.int64)


def loss_divisor(
    name: str, labels: Tensor, num_items: Tensor | int | None, ignore_index: int, dtype: torch.dtype
) -> Tensor:
    """What the summed loss is divided by: a 0-d tensor beside the labels, never read by the host."""
    if num_items is None:
        return (labels != ignore_index).sum().to(dtype)
    if not isinstance(num_items, Tensor):
        return torch.full((), num_items, dtype=dtype, device=labels.device)
    if num_items.numel() != 1:
        _refuse(name, f"num_items_in_batch of shape {tuple(num_items.shape)}", "a number or a tensor of one element")
    return num_items.reshape(()).to(device=labels.device, dtype=dtype)


def _refuse(name: str, found: str, wanted: str) -> NoReturn:
    raise KernelError(
        explain_problem(
            f"cross_entropy_loss kernel {name!r} does not serve these arguments",
            found,
            f"pass {wanted}; or set cross_entropy_loss_implementation to 'eager'",
        )
    )


def _loss(
    name: str,
    hidden_states: Tensor,
    weight: Tensor,
    labels: Tensor,
    num_items: Tensor | int | None,
    shaping: ShapingArguments,
) -> Tensor:
    hidden, weight, labels = flat_inputs(name, hidden_states, weight, labels)
    divisor = loss_divisor(name, labels, num_items, shaping[0], wide(hidden.dtype))
    recording = torch.is_grad_enabled()
    wanted = (recording and hidden.requires_grad, recording and weight.requires_grad)
    if any(wanted):
        return _LinearCrossEntropy.apply(name, hidden, weight, labels, divisor, *shaping, *wanted)
    return _op("linear_cross_entropy", name)(hidden, weight, labels, divisor, *shaping, *wanted)[0]


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str, hidden: Tensor, weight: Tensor, *arguments: Any) -> Tensor:
        loss, grad_hidden, grad_weight = _op("linear_cross_entropy", name)(hidden, weight, *arguments)
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.name, ctx.dtype, ctx.wanted = name, hidden.dtype, arguments[-2:]
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        hidden, weight = (
            _times(ctx.name, grad, grad_output).to(ctx.dtype) if wanted else None
            for grad, wanted in zip(ctx.saved_tensors, ctx.wanted, strict=True)
        )
        return None, hidden, weight, *[None] * 8


def _times(name: str, grad: Tensor, factor: Tensor) -> Tensor:
    """`grad * factor`, in place where nobody reads `grad` again: the weight's gradient is the largest tensor of all."""
    if torch.compiler.is_compiling() or torch._C._autograd._get_current_graph_task_keep_graph():
        return grad * factor
    _BACKENDS[name].rescale(grad, factor)
    return grad


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, name: str, hidden: Tensor, weight: Tensor, labels: Tensor, *shaping: Any
    ) -> tuple[Tensor, Tensor]:
        log_probs, entropy = _op("token_log_probs", name)(hidden, weight, labels, *shaping)
        ctx.save_for_backward(hidden, weight, labels, entropy)
        ctx.name, ctx.shaping = name, shaping
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs: Tensor, grad_entropy: Tensor) -> Any:
        wanted = ctx.needs_input_grad[1], ctx.needs_input_grad[2]
        op = _op("token_log_probs_backward", ctx.name)
        hidden, weight = op(*ctx.saved_tensors, grad_log_probs, grad_entropy, *ctx.shaping, *wanted)
        return None, hidden if wanted[0] else None, weight if wanted[1] else None, *[None] * 5


def _op(op: str, name: str) -> Callable[..., Any]:
    return getattr(torch.ops.opslot, f"{op}_{name}")


def _empty_grads(
    hidden: Tensor, weight: Tensor, dtype: torch.dtype, want_hidden: bool, want_weight: bool
) -> tuple[Tensor, Tensor]:
    return (
        torch.empty(hidden.shape if want_hidden else 0, dtype=dtype, device=hidden.device),
        torch.empty_like(weight, dtype=dtype) if want_weight else weight.new_empty(0, dtype=dtype),
    )


def _define_loss_op(backend: Backend) -> None:
    def loss(hidden: Tensor, weight: Tensor, labels: Tensor, divisor: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        *shaping, want_hidden, want_weight = rest
        with torch.autocast(hidden.device.type, enabled=False):
            return loss_and_gradients(
                backend, hidden, weight, labels, divisor, Shaping(*shaping), want_hidden, want_weight
            )

    def fake(hidden: Tensor, weight: Tensor, labels: Tensor, divisor: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        return divisor.new_empty(()), *_empty_grads(hidden, weight, gradient_dtype(hidden.dtype), *rest[-2:])

    torch.library.custom_op(
        f"opslot::linear_cross_entropy_{backend.name}",
        loss,
        mutates_args=(),
        schema=f"(Tensor hidden, Tensor weight, Tensor labels, Tensor divisor, {_SHAPING}, {_WANTED})"
        " -> (Tensor, Tensor, Tensor)",
    ).register_fake(fake)


def _define_token_ops(backend: Backend) -> None:
    def forward(hidden: Tensor, weight: Tensor, labels: Tensor, *shaping: Any) -> tuple[Tensor, Tensor]:
        with torch.autocast(hidden.device.type, enabled=False):
            return tokens(backend, hidden, weight, labels, Shaping(*shaping))

    def forward_fake(hidden: Tensor, weight: Tensor, labels: Tensor, *shaping: Any) -> tuple[Tensor, Tensor]:
        dtype = wide(hidden.dtype)
        return torch.empty_like(labels, dtype=dtype), torch.empty_like(labels, dtype=dtype)

    def backward(hidden: Tensor, weight: Tensor, labels: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        *shaping, want_hidden, want_weight = rest[3:]
        with torch.autocast(hidden.device.type, enabled=False):
            return token_gradients(
                backend, hidden, weight, labels, *rest[:3], Shaping(*shaping), want_hidden, want_weight
            )

    def backward_fake(hidden: Tensor, weight: Tensor, labels: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        return _empty_grads(hidden, weight, hidden.dtype, *rest[-2:])

    inputs = "Tensor hidden, Tensor weight, Tensor labels"
    torch.library.custom_op(
        f"opslot::token_log_probs_{backend.name}",
        forward,
        mutates_args=(),
        schema=f"({inputs}, {_SHAPING}) -> (Tensor, Tensor)",
    ).register_fake(forward_fake)
    torch.library.custom_op(
        f"opslot::token_log_probs_backward_{backend.name}",
        backward,
        mutates_args=(),
        schema=f"({inputs}, Tensor entropy, Tensor grad_log_probs, Tensor grad_entropy,"
        f" {_SHAPING}, {_WANTED}) -> (Tensor, Tensor)",
    ).register_fake(backward_fake)
