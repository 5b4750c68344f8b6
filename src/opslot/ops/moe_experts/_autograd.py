"""Combines a forward and a backward function of experts into a differentiable custom op."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from opslot._base.errors import KernelError
from opslot.ops._common.custom_op import differentiable_op
from opslot.ops.moe_experts.contract import Experts


class Wanted(NamedTuple):
    """Which gradients the caller needs; that of the routing weights is always computed."""

    inputs: bool
    weights: bool
    biases: bool


class Grads(NamedTuple):
    """Gradients; None where not wanted."""

    hidden_states: Tensor | None
    gate_up_proj: Tensor | None
    down_proj: Tensor | None
    top_k_weights: Tensor
    up_proj: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None


# (hidden_states, experts, top_k_index, top_k_weights) -> output and what backward needs
Forward = Callable[[Tensor, Experts, Tensor, Tensor], tuple[Tensor, ...]]
# (grad, hidden_states, experts, top_k_weights, what forward saved, wanted)
Backward = Callable[[Tensor, Tensor, Experts, Tensor, Sequence[Tensor], Wanted], Grads]

# The tensors with gradients in the order of `Grads`, then the indices.
TENSORS = (
    "Tensor hidden_states, Tensor gate_up_proj, Tensor down_proj, Tensor top_k_weights, Tensor? up_proj,"
    " Tensor? gate_up_bias, Tensor? down_bias"
)
GATING = (
    "float? limit, float alpha, float up_offset, str activation, bool clamps_activation, bool gated, bool transposed,"
    " bool down_transposed"
)


def differentiable(
    name: str, forward: Forward, backward: Backward, fake: Forward, module: str = ""
) -> Callable[[Tensor, Experts, Tensor, Tensor], Tensor]:
    """Register opslot::<name> and its backward; returns a function of tokens, experts, indices and routing weights.

    Args:
        fake: `forward` on fake tensors: empty tensors of the right shapes; the output's is like hidden_states.
        module: name of the module that holds the kernel, for error messages; default that of `forward`.
    """
    shapes = ((1, 1), (1, 2, 1), (1, 1, 1), (1, 1), (1, 1))
    x, gate_up, down, index, weights = (torch.empty(shape, device="meta") for shape in shapes)
    saved = [f"saved{i}" for i in range(len(fake(x, Experts(gate_up, down), index, weights)) - 1)]

    def unpacked(function: Forward) -> Callable[..., tuple[Tensor, ...]]:
        def run(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, *rest: Any) -> tuple[Tensor, ...]:
            *optional, index = rest[:4]
            return on_its_device(function, x, Experts(gate_up, down, *optional, *rest[4:]), index, weights)

        return run

    def run_backward(
        grad: Tensor, x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, *rest: Any
    ) -> tuple[Tensor | None, ...]:
        optional, found, options, needs = rest[:3], rest[3 : 3 + len(saved)], rest[3 + len(saved) : -7], rest[-7:]
        experts = Experts(gate_up, down, *optional, *options)
        wanted = Wanted(needs[0], needs[1] or needs[2] or needs[4], needs[5] or needs[6])
        grads = on_its_device(backward, grad, x, experts, weights, found, wanted)
        # An op must not return a tensor that was not requested: another gradient may share its memory.
        return tuple([g if need else None for g, need in zip(grads, needs, strict=True)])

    function = differentiable_op(
        f"{name}({TENSORS}, Tensor top_k_index, {GATING}) -> ({', '.join(f'Tensor {x}' for x in ['out', *saved])})",
        allocate=unpacked(fake),
        launch=unpacked(forward),
        launch_backward=run_backward,
        in_place=False,
        module=module or forward.__module__,
        differentiable=len(Grads._fields),
        kept=(*[tensor.split()[1] for tensor in TENSORS.split(", ")], *saved),
        returned=1,
    )

    def apply(hidden_states: Tensor, experts: Experts, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            _reject_tangents(name, hidden_states, *experts, top_k_weights)
        return function(hidden_states, *experts[:2], top_k_weights, *experts[2:5], top_k_index, *experts[5:])

    return apply


def _reject_tangents(name: str, *arguments: Any) -> None:
    """Raise for forward-mode AD: operators of torch.library silently drop tangents."""
    if any(isinstance(x, Tensor) and unpack_dual(x).tangent is not None for x in arguments):
        raise KernelError(
            f"moe_experts: the kernel {name} has no forward-mode derivative",
            hint="set moe_implementation to eager, or use reverse-mode differentiation",
        )


def on_its_device(function: Callable[..., Any], tensor: Tensor, *rest: Any) -> Any:
    """Kernels launch on the current GPU, which may not be that of the tensors if a model spans several GPUs."""
    if tensor.device.type != "cuda":
        return function(tensor, *rest)
    with torch.cuda.device(tensor.device):
        return function(tensor, *rest)
