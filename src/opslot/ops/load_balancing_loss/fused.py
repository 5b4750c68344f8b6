"""Argument checks, custom ops and autograd that the load-balancing kernels share.

The gradient by a row's logits needs only that row and the experts' counts: with c_e = E * f_e / rows, it is
p_e * (c_e - sum_j p_j c_j). So the forward keeps the counts, and the backward computes the softmax again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from opslot.ops._common.library import refuse


@dataclass(frozen=True)
class Backend:
    """The two passes over the logits: L layers of [T, E], weights of rows [T] in the wide dtype or None.

    Attributes:
        name: the kernel's name and part of its custom ops'.
        forward: (layers, weights, top_k) -> (loss, coefficients c [E]), in the wide dtype.
        backward: (layers, weights, coefficients, grad_loss) -> gradients [L, T, E] in the layers' dtype.
    """

    name: str
    forward: Callable[[Sequence[Tensor], Tensor | None, int], tuple[Tensor, Tensor]]
    backward: Callable[[Sequence[Tensor], Tensor | None, Tensor, Tensor], Tensor]


_BACKENDS: dict[str, Backend] = {}


def make_kernel(backend: Backend) -> Callable[..., Tensor | int]:
    """The backend's kernel; defines its custom ops, so it is called once per backend."""
    name = backend.name
    _BACKENDS[name] = backend
    _define_ops(backend)

    def standard(
        gate_logits: tuple[Tensor, ...] | None,
        num_experts: int | None = None,
        top_k: int = 2,
        attention_mask: Tensor | None = None,
    ) -> Tensor | int:
        if gate_logits is None or not isinstance(gate_logits, tuple):
            return 0
        _check(name, gate_logits, num_experts, top_k, attention_mask)
        first = gate_logits[0]
        weights = None
        if attention_mask is not None:
            weights = attention_mask.reshape(-1).to(device=first.device, dtype=wide(first.dtype))
        if any(layer.device != first.device for layer in gate_logits):
            gate_logits = tuple(layer.to(first.device) for layer in gate_logits)
        return _LoadBalancingLoss.apply(name, weights, top_k, *gate_logits)

    return standard


class _LoadBalancingLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str, weights: Tensor | None, top_k: int, *layers: Tensor) -> Tensor:
        if _traced(layers):
            loss, coefficients = _op("load_balancing_loss", name)(layers, weights, top_k)
        else:
            loss, coefficients = _BACKENDS[name].forward(layers, weights, top_k)
        ctx.save_for_backward(coefficients, weights, *layers)
        ctx.name = name
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> Any:
        coefficients, weights, *layers = ctx.saved_tensors
        if _traced(layers):
            grads = _op("load_balancing_loss_backward", ctx.name)(layers, weights, coefficients, grad_loss)
        else:
            grads = _BACKENDS[ctx.name].backward(layers, weights, coefficients, grad_loss)
        return None, None, None, *grads.unbind()


def _traced(layers: Sequence[Tensor]) -> bool:
    """Whether a graph is being recorded. Otherwise the dispatcher, which is slow with many tensors, is left out."""
    return torch.compiler.is_compiling() or type(layers[0]) is not Tensor


def _op(op: str, name: str) -> Callable[..., Any]:
    return getattr(torch.ops.opslot, f"{op}_{name}")


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of softmax and loss: float32 or wider."""
    return torch.promote_types(dtype, torch.float32)


def _check(
    name: str, gate_logits: tuple[Tensor, ...], num_experts: int | None, top_k: int, attention_mask: Tensor | None
) -> None:
    if not gate_logits:
        _refuse(name, "gate_logits", "an empty tuple")
    first = gate_logits[0]
    if any(x.dim() != 2 or x.shape != first.shape or x.dtype != first.dtype for x in gate_logits):
        kinds = ", ".join(sorted({f"{tuple(x.shape)} {x.dtype}" for x in gate_logits}))
        _refuse(name, "gate_logits", f"{kinds}, not one shape [T, E] and dtype")
    if num_experts != first.shape[1]:
        _refuse(name, "num_experts", f"{num_experts} beside gate_logits of shape {tuple(first.shape)}")
    if not 1 <= top_k <= first.shape[1]:
        _refuse(name, "top_k", f"{top_k} of {first.shape[1]} experts")
    if attention_mask is not None and attention_mask.numel() != first.shape[0]:
        found = f"shape {tuple(attention_mask.shape)} beside gate_logits of shape {tuple(first.shape)}"
        _refuse(name, "attention_mask", found)


def _refuse(name: str, argument: str, found: str) -> NoReturn:
    field = "load_balancing_loss_implementation"
    refuse(f"{field}={name!r}", argument, found, f"fix the argument, or set {field} to 'eager'")


def _define_ops(backend: Backend) -> None:
    def forward_fake(layers: Sequence[Tensor], weights: Tensor | None, top_k: int) -> tuple[Tensor, Tensor]:
        first = layers[0]
        dtype = wide(first.dtype)
        return first.new_empty((), dtype=dtype), first.new_empty(first.shape[1], dtype=dtype)

    def backward_fake(
        layers: Sequence[Tensor], weights: Tensor | None, coefficients: Tensor, grad_loss: Tensor
    ) -> Tensor:
        return layers[0].new_empty(len(layers), *layers[0].shape)

    torch.library.custom_op(
        f"opslot::load_balancing_loss_{backend.name}",
        backend.forward,
        mutates_args=(),
        schema="(Tensor[] layers, Tensor? weights, int top_k) -> (Tensor, Tensor)",
    ).register_fake(forward_fake)
    torch.library.custom_op(
        f"opslot::load_balancing_loss_backward_{backend.name}",
        backend.backward,
        mutates_args=(),
        schema="(Tensor[] layers, Tensor? weights, Tensor coefficients, Tensor grad_loss) -> Tensor",
    ).register_fake(backward_fake)
