"""A forward and a backward function as one differentiable torch operator, opaque to torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

# Of hidden_states, gate_up_proj, down_proj and top_k_weights; None where not wanted.
Grads = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor]
Forward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, ...]]
Backward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Sequence[Tensor], bool, bool], Grads]

_INPUTS = "Tensor hidden_states, Tensor gate_up_proj, Tensor down_proj"


def differentiable(name: str, forward: Forward, backward: Backward, fake: Forward) -> Callable[..., Tensor]:
    """Register opslot::<name> and its backward; returns a function of the contract's five tensors.

    Args:
        forward: (hidden_states, gate_up_proj, down_proj, top_k_index, top_k_weights) -> output and what backward needs.
        backward: (grad, hidden_states, gate_up_proj, down_proj, top_k_weights, saved, input_grad, weight_grad) ->
            `Grads`, None where the two flags say that none is wanted.
        fake: `forward` on fake tensors: empty tensors of the right shapes; the output's is like hidden_states.
    """
    outputs = len(fake(*(torch.empty(s, device="meta") for s in ((1, 1), (1, 2, 1), (1, 1, 1), (1, 1), (1, 1)))))
    returned = ", ".join(["Tensor"] * outputs)
    op = torch.library.custom_op(
        f"opslot::{name}",
        lambda x, *rest: _on_its_device(forward, x, *rest),
        mutates_args=(),
        schema=f"({_INPUTS}, Tensor top_k_index, Tensor top_k_weights) -> ({returned})",
    )

    def run_wanted(grad, *rest):
        """An operator returns tensors, and no tensor twice: unwanted gradients become empty ones."""
        input_grad, weight_grad = rest[-2:]
        wanted = (input_grad, weight_grad, weight_grad, True)
        grads = _on_its_device(backward, grad, *rest)
        return tuple(g if w else grad.new_empty(0) for g, w in zip(grads, wanted, strict=True))

    backward_op = torch.library.custom_op(
        f"opslot::{name}_backward",
        run_wanted,
        mutates_args=(),
        schema=f"(Tensor grad, {_INPUTS}, Tensor top_k_weights, Tensor[] saved, bool input_grad, bool weight_grad)"
        " -> (Tensor, Tensor, Tensor, Tensor)",
    )

    def setup_context(ctx, inputs, output) -> None:
        hidden_states, gate_up_proj, down_proj, _, top_k_weights = inputs
        ctx.save_for_backward(hidden_states, gate_up_proj, down_proj, top_k_weights, *output[1:])
        ctx.mark_non_differentiable(*output[1:])

    def run_backward(ctx, grad, *_):
        needs = ctx.needs_input_grad
        # Read once: activation checkpointing recomputes at the first read and refuses a second.
        x, gate_up, down, weights, *saved = ctx.saved_tensors
        grads = backward_op(grad, x, gate_up, down, weights, saved, needs[0], needs[1] or needs[2])
        kept = [g if needed else None for g, needed in zip(grads, (*needs[:3], needs[4]), strict=True)]
        return *kept[:3], None, kept[3]

    op.register_fake(fake)
    backward_op.register_fake(_fake_backward)
    op.register_autograd(run_backward, setup_context=setup_context)
    return lambda *tensors: op(*tensors)[0]


def _on_its_device(function: Callable[..., Any], tensor: Tensor, *rest: Any) -> Any:
    """Kernels are launched on the current GPU, which need not be the tensors' where a model spans several."""
    if tensor.device.type != "cuda":
        return function(tensor, *rest)
    with torch.cuda.device(tensor.device):
        return function(tensor, *rest)


def _fake_backward(
    grad: Tensor,
    hidden_states: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    top_k_weights: Tensor,
    saved: Sequence[Tensor],
    input_grad: bool,
    weight_grad: bool,
) -> tuple[Tensor, ...]:
    def like(t: Tensor, wanted: bool) -> Tensor:
        return torch.empty_like(t, memory_format=torch.contiguous_format) if wanted else t.new_empty(0)

    return (
        like(hidden_states, input_grad),
        like(gate_up_proj, weight_grad),
        like(down_proj, weight_grad),
        like(top_k_weights, True),
    )
