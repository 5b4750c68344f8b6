"""Argument checks, custom ops and autograd that the load-balancing kernels share.

The gradient by a row's logits needs only that row and the experts' counts: with c_e = E * f_e / rows, it is
p_e * (c_e - sum_j p_j c_j). So the forward keeps the counts, and the backward computes the softmax again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opslot._base.errors import KernelError, explain_problem


@dataclass(frozen=True)
class Backend:
    """The two passes over the logits; L layers of [T, E], weights of rows [T] in the wide dtype or None.

    Attributes:
        name: the kernel's name and part of its custom ops'.
        sums: (layers, row_weights, top_k) -> [2, E] float64: choices and probabilities of each expert, summed over
            all rows.
        gradients: (layers, row_weights, coefficients [E]) -> [L, T, E] in the layers' dtype: p_e (c_e - sum_j p_j
            c_j), weighted.
    """

    name: str
    sums: Callable[[Sequence[Tensor], Tensor | None, int], Tensor]
    gradients: Callable[[Sequence[Tensor], Tensor | None, Tensor], Tensor]


def make_kernel(backend: Backend) -> Callable[..., Tensor | int]:
    """The backend's kernel; defines its custom op, so it is called once per backend."""
    op = _define_op(backend)

    def standard(
        gate_logits: tuple[Tensor, ...] | None,
        num_experts: int | None = None,
        top_k: int = 2,
        attention_mask: Tensor | None = None,
    ) -> Tensor | int:
        if gate_logits is None or not isinstance(gate_logits, tuple):
            return 0
        _check(backend.name, gate_logits, num_experts, top_k, attention_mask)
        first = gate_logits[0]
        layers = [layer.to(first.device) for layer in gate_logits]
        weights = None
        if attention_mask is not None:
            weights = attention_mask.reshape(-1).to(device=first.device, dtype=_wide(first.dtype))
        return op(layers, weights, top_k)[0]

    return standard


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _check(
    name: str, gate_logits: tuple[Tensor, ...], num_experts: int | None, top_k: int, attention_mask: Tensor | None
) -> None:
    if not gate_logits:
        _refuse(name, "gate_logits is an empty tuple", "the router logits of at least one layer")
    first = gate_logits[0]
    if any(x.dim() != 2 or x.shape != first.shape or x.dtype != first.dtype for x in gate_logits):
        kinds = ", ".join(sorted({f"{tuple(x.shape)} {x.dtype}" for x in gate_logits}))
        _refuse(name, f"gate_logits of {kinds}", "[T, E] logits of one shape and dtype")
    if num_experts != first.shape[1]:
        _refuse(name, f"num_experts={num_experts}, gate_logits of shape {tuple(first.shape)}", "num_experts = E")
    if not 1 <= top_k <= first.shape[1]:
        _refuse(name, f"top_k={top_k} of {first.shape[1]} experts", "top_k from 1 to E")
    if attention_mask is not None and attention_mask.numel() != first.shape[0]:
        shapes = f"attention_mask of shape {tuple(attention_mask.shape)}, gate_logits of shape {tuple(first.shape)}"
        _refuse(name, shapes, "one mask entry per row of the logits")


def _refuse(name: str, found: str, wanted: str) -> None:
    raise KernelError(
        explain_problem(
            f"load_balancing_loss kernel {name!r} does not serve these arguments",
            found,
            f"pass {wanted}; or set load_balancing_loss_implementation to 'eager'",
        )
    )


def _define_op(backend: Backend) -> Callable[..., tuple[Tensor, Tensor]]:
    def forward(layers: list[Tensor], weights: Tensor | None, top_k: int) -> tuple[Tensor, Tensor]:
        """(loss, coefficients of the gradient [E])."""
        wide = _wide(layers[0].dtype)
        rows = len(layers) * (layers[0].shape[0] if weights is None else weights.sum(dtype=torch.float64))
        # The few numbers left are worth float64: the loss is then rounded once.
        chosen, probability = (backend.sums(layers, weights, top_k) / rows).unbind()
        loss = (chosen * probability).sum() * len(chosen)
        return loss.to(wide), (chosen * (len(chosen) / rows)).to(wide)

    def forward_fake(layers: list[Tensor], weights: Tensor | None, top_k: int) -> tuple[Tensor, Tensor]:
        wide = _wide(layers[0].dtype)
        return layers[0].new_empty((), dtype=wide), layers[0].new_empty(layers[0].shape[1], dtype=wide)

    def backward(layers: list[Tensor], weights: Tensor | None, coefficients: Tensor) -> Tensor:
        return backend.gradients(layers, weights, coefficients)

    def backward_fake(layers: list[Tensor], weights: Tensor | None, coefficients: Tensor) -> Tensor:
        return layers[0].new_empty(len(layers), *layers[0].shape)

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        layers, weights, _ = inputs
        ctx.masked = weights is not None
        ctx.save_for_backward(output[1], *([weights] if ctx.masked else []), *layers)

    def gradient(ctx: Any, grad_loss: Tensor, _: Tensor) -> Any:
        coefficients, *layers = ctx.saved_tensors
        weights = layers.pop(0) if ctx.masked else None
        return list(backward_op(layers, weights, coefficients * grad_loss).unbind()), None, None

    op = torch.library.custom_op(
        f"opslot::load_balancing_loss_{backend.name}",
        forward,
        mutates_args=(),
        schema="(Tensor[] layers, Tensor? weights, int top_k) -> (Tensor, Tensor)",
    )
    backward_op = torch.library.custom_op(
        f"opslot::load_balancing_loss_backward_{backend.name}",
        backward,
        mutates_args=(),
        schema="(Tensor[] layers, Tensor? weights, Tensor coefficients) -> Tensor",
    )
    op.register_fake(forward_fake)
    op.register_autograd(gradient, setup_context=setup)
    backward_op.register_fake(backward_fake)
    return op
