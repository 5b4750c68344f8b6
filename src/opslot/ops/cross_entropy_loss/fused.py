"""The fused kernels: argument checks, custom ops and autograd around `chunked`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from opslot._base.host_values import device_copy
from opslot.ops._common.arguments import in_autocast_dtype, reject
from opslot.ops._common.contract import variants_of
from opslot.ops._common.custom_op import autograd_function, custom_op, differentiable_op
from opslot.ops.cross_entropy_loss.chunked import (
    Backend,
    Head,
    Shaping,
    gradient_dtype,
    loss_and_gradients,
    loss_dtype,
    token_gradients,
    tokens,
)
from opslot.ops.cross_entropy_loss.contract import LOSSES, LossInputs, token_log_probs
from opslot.ops.cross_entropy_loss.low_rank import low_rank_of

_INPUTS = "Tensor hidden, Tensor weight, Tensor? bias, Tensor? low_hidden, Tensor? low_weight, Tensor labels"
_SHAPING = "int ignore_index, float smoothing, float cap, float scale"
_WANTED = "bool want_hidden, bool want_weight, bool want_bias, bool want_low_hidden, bool want_low_weight"
_GRADIENTS = ", ".join(["Tensor"] * 5)

ShapingArguments = tuple[int, float, float, float]
_Op = Callable[..., Any]


def make_kernels(backend: Backend) -> tuple[Callable[..., Any], ...]:
    """The backend's kernels of causal, sequence_classification and token_log_probs.

    Defines its custom ops, so it is called once per backend.
    """
    module = backend.loss_step.__module__
    losses = variants_of(partial(_loss, backend, _loss_op(backend)), LOSSES, module)
    of_tokens = variants_of(partial(_token_log_probs, backend, _token_op(backend)), [token_log_probs], module)
    kernels: tuple[Any, ...] = (*losses, *of_tokens)
    for kernel in kernels:
        # Those of the module that it gets as the keyword `head`.
        kernel.adds_adapters = True
    return kernels


def _shape(name: str, softcap: float | None, logit_scale: float) -> tuple[float, float]:
    """Both as numbers; rejects tensors that require a gradient, which would be lost."""
    for argument, value in (("softcap", softcap), ("logit_scale", logit_scale)):
        if isinstance(value, Tensor) and value.requires_grad:
            _reject(name, argument, "it requires a gradient, and only hidden_states and weight receive one")
    return float(softcap or 0.0), float(logit_scale)


Flat = tuple[Tensor, Tensor, Tensor | None, Tensor]


def flat_inputs(name: str, hidden_states: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> Flat:
    """([N, H], [V, H], [V] or None, [N] int64) on one device, all but the last in one dtype: autocast's where it is on.

    Raises:
        KernelError: shapes, dtypes or devices do not fit together.
    """
    device = hidden_states.device
    if device.type == "meta":
        _reject(name, "hidden_states", "it is on meta, where tensors have no data")
    hidden_states, weight, bias = in_autocast_dtype(hidden_states, weight, bias)
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


def _prepared(backend: Backend, inputs: LossInputs) -> tuple[Head, Tensor, ShapingArguments]:
    """The logits to compute, with the adapters of the module `head`, and the labels [N]."""
    name = backend.name
    shaping = (inputs.ignore_index, float(inputs.label_smoothing), *_shape(name, inputs.softcap, inputs.logit_scale))
    hidden, weight, bias, labels = flat_inputs(name, *inputs[:4])
    reason = backend.unsupported(hidden)
    if reason:
        _reject(name, "hidden_states", reason)
    low_rank = None if inputs.head is None else low_rank_of(inputs.head, hidden)
    low_hidden, low_weight = (None, None) if low_rank is None else (t.to(hidden.dtype) for t in low_rank)
    return Head(hidden, weight, bias, low_hidden, low_weight), labels, shaping


def _reject(name: str, argument: str, found: str) -> NoReturn:
    field = "cross_entropy_loss_implementation"
    reject(f"{field}={name!r}", argument, found, f"fix the argument, or set {field} to 'eager'")


def _loss(backend: Backend, op: _Op, inputs: LossInputs) -> Tensor:
    head, labels, shaping = _prepared(backend, inputs)
    if not 0.0 <= shaping[1] <= 1.0:
        _reject(backend.name, "label_smoothing", f"{shaping[1]}, not between 0 and 1")
    divisor = loss_divisor(backend.name, labels, inputs.num_items_in_batch, shaping[0], loss_dtype(head.hidden.dtype))
    recording = torch.is_grad_enabled()
    wanted = tuple([recording and x is not None and x.requires_grad for x in head])
    return op(*head, labels, divisor, *shaping, *wanted)


def _token_log_probs(backend: Backend, op: _Op, inputs: LossInputs) -> tuple[Tensor, Tensor]:
    head, labels, shaping = _prepared(backend, inputs)
    log_probs, entropy = op(*head, labels, *shaping)
    return log_probs.view(inputs.labels.shape), entropy.view(inputs.labels.shape)


def _loss_op(backend: Backend) -> _Op:
    """The loss; forward computes the gradients too, and backward scales them."""
    with_gradients = _loss_and_gradients_op(backend)

    def forward(ctx: Any, hidden: Tensor, *arguments: Any) -> Tensor:
        loss, *gradients = with_gradients(hidden, *arguments)
        ctx.save_for_backward(*gradients)
        ctx.dtype, ctx.wanted = hidden.dtype, arguments[-5:]
        return loss

    def backward(ctx: Any, grad_output: Tensor) -> Any:
        gradients = [
            _times(backend, grad, grad_output).to(ctx.dtype) if wanted else None
            for grad, wanted in zip(ctx.saved_tensors, ctx.wanted, strict=True)
        ]
        return *gradients, *[None] * 11

    return autograd_function("linear_cross_entropy", forward, backward, backend.loss_step.__module__)


def _times(backend: Backend, grad: Tensor, factor: Tensor) -> Tensor:
    """`grad * factor`, in place if `grad` is not used again, since the weight's gradient is the largest tensor."""
    if torch.compiler.is_compiling() or torch._C._autograd._get_current_graph_task_keep_graph():
        return grad * factor
    backend.rescale(grad, factor)
    return grad


def _empty_grads(head: Sequence[Tensor | None], dtype: torch.dtype, wanted: Sequence[bool]) -> tuple[Tensor, ...]:
    like = head[0]
    assert like is not None
    return tuple(
        [
            torch.empty_like(t, dtype=dtype) if wants and t is not None else like.new_empty(0, dtype=dtype)
            for t, wants in zip(head, wanted, strict=True)
        ]
    )


def _loss_and_gradients_op(backend: Backend) -> _Op:
    def loss(hidden: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
        head, (labels, divisor), rest = Head(hidden, *arguments[:4]), arguments[4:6], arguments[6:]
        with torch.autocast(hidden.device.type, enabled=False):
            value, gradients = loss_and_gradients(backend, head, labels, divisor, Shaping(*rest[:-5]), rest[-5:])
        return value, *gradients

    def fake(hidden: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
        head = (hidden, *arguments[:4])
        return arguments[5].new_empty(()), *_empty_grads(head, gradient_dtype(hidden.dtype), arguments[-5:])

    arguments = f"{_INPUTS}, Tensor divisor, {_SHAPING}, {_WANTED}"
    schema = f"linear_cross_entropy_{backend.name}({arguments}) -> (Tensor, {_GRADIENTS})"
    return custom_op(schema, loss, fake)


def _token_op(backend: Backend) -> _Op:
    def forward(hidden: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
        with torch.autocast(hidden.device.type, enabled=False):
            return tokens(backend, Head(hidden, *arguments[:4]), arguments[4], Shaping(*arguments[5:]))

    def fake(hidden: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
        labels, dtype = arguments[4], loss_dtype(hidden.dtype)
        return torch.empty_like(labels, dtype=dtype), torch.empty_like(labels, dtype=dtype)

    def backward(grad_log_probs: Tensor | None, grad_entropy: Tensor | None, *arguments: Any) -> Any:
        head, labels, entropy, shaping = Head(*arguments[:5]), arguments[5], arguments[6], Shaping(*arguments[7:-5])
        grads = [torch.zeros_like(entropy) if grad is None else grad for grad in (grad_log_probs, grad_entropy)]
        with torch.autocast(entropy.device.type, enabled=False):
            found = token_gradients(backend, head, labels, entropy, grads[0], grads[1], shaping, arguments[-5:])
        return tuple([grad if wanted else None for grad, wanted in zip(found, arguments[-5:], strict=True)])

    return differentiable_op(
        f"token_log_probs_{backend.name}({_INPUTS}, {_SHAPING}) -> (Tensor log_probs, Tensor entropy)",
        allocate=fake,
        launch=forward,
        launch_backward=backward,
        in_place=False,
        differentiable=5,
        kept=("hidden", "weight", "bias", "low_hidden", "low_weight", "labels", "entropy"),
    )
