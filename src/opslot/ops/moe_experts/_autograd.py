"""Combines a forward and a backward function of experts into a differentiable custom op."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from opslot._base.errors import KernelError
from opslot.ops._common.custom_op import autograd_function, custom_op, empty_gradients


class Experts(NamedTuple):
    """The parameters of the local experts, and their gating.

    Attributes:
        gate_up_proj: [E, 2I, H], gate rows first; transposed [E, H, 2I], gate columns first, or with biases
            interleaved with those of up; with `up_proj` only the gate, [E, I, H]; not gated, the only one, [E, I, H].
        down_proj: [E, H, I]; transposed [E, I, H].
        up_proj: [E, I, H], or None if `gate_up_proj` has both.
        gate_up_bias, down_bias: [E, 2I] and [E, H], or None.
        limit, alpha, up_offset, clamps_activation: as in `op.clamped`; without `limit` nothing is clamped.
        activation: a name in `ACTIVATIONS`; with `alpha` it is "silu".
        gated: act(gate) * up; else act(up).
        transposed, down_transposed: the layouts of `gate_up_proj` and `down_proj`.
    """

    gate_up_proj: Tensor
    down_proj: Tensor
    up_proj: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    limit: float | None = None
    alpha: float = 1.0
    up_offset: float = 0.0
    activation: str = "silu"
    clamps_activation: bool = False
    gated: bool = True
    transposed: bool = False
    down_transposed: bool = False

    @property
    def biased(self) -> bool:
        return self.gate_up_bias is not None

    @property
    def gate_up_weights(self) -> tuple[Tensor, ...]:
        """The weights of the first GEMM: (gate_up_proj,) or (gate_proj, up_proj)."""
        return (self.gate_up_proj,) if self.up_proj is None else (self.gate_up_proj, self.up_proj)

    @property
    def halves(self) -> int:
        """2 if a weight of the first GEMM has gate and up, else 1."""
        return 2 if self.gated and self.up_proj is None else 1

    @property
    def sizes(self) -> tuple[int, int, int]:
        """E, H and I."""
        experts, first, second = self.down_proj.shape
        return (experts, second, first) if self.down_transposed else (experts, first, second)

    @property
    def plain(self) -> bool:
        """Whether the gating is silu(gate) * up."""
        gating = self.limit, self.alpha, self.up_offset, self.activation, self.gated
        return gating == (None, 1.0, 0.0, "silu", True)


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

_EXPERTS = "Tensor? up_proj, Tensor? gate_up_bias, Tensor? down_bias"
GATING = (
    "float? limit, float alpha, float up_offset, str activation, bool clamps_activation, bool gated, bool transposed,"
    " bool down_transposed"
)
_OPTIONS = len(Experts._fields) - 5
_INPUTS = "Tensor hidden_states, Tensor gate_up_proj, Tensor down_proj"


def differentiable(
    name: str, forward: Forward, backward: Backward, fake: Forward
) -> Callable[[Tensor, Experts, Tensor, Tensor], Tensor]:
    """Register opslot::<name> and its backward; returns a function of tokens, experts, indices and routing weights.

    Args:
        fake: `forward` on fake tensors: empty tensors of the right shapes; the output's is like hidden_states.
    """
    shapes = ((1, 1), (1, 2, 1), (1, 1, 1), (1, 1), (1, 1))
    x, gate_up, down, index, weights = (torch.empty(shape, device="meta") for shape in shapes)
    returned = ", ".join(["Tensor"] * len(fake(x, Experts(gate_up, down), index, weights)))

    def run(x: Tensor, gate_up: Tensor, down: Tensor, index: Tensor, weights: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        return on_its_device(forward, x, Experts(gate_up, down, *rest), index, weights)

    def run_fake(
        x: Tensor, gate_up: Tensor, down: Tensor, index: Tensor, weights: Tensor, *rest: Any
    ) -> tuple[Tensor, ...]:
        return fake(x, Experts(gate_up, down, *rest), index, weights)

    def run_backward(
        grad: Tensor, x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, *rest: Any
    ) -> tuple[Tensor | None, ...]:
        *optional, saved = rest[:4]
        options, needs = rest[4 : 4 + _OPTIONS], rest[4 + _OPTIONS :]
        experts, wanted = Experts(gate_up, down, *optional, *options), Wanted(*needs)
        grads = on_its_device(backward, grad, x, experts, weights, saved, wanted)
        # An op must not return a tensor that was not requested: another gradient may share its memory.
        return tuple([g if w else None for g, w in zip(grads, _each(wanted), strict=True)])

    op = custom_op(
        f"{name}({_INPUTS}, Tensor top_k_index, Tensor top_k_weights, {_EXPERTS}, {GATING}) -> ({returned})",
        run,
        run_fake,
    )
    backward_op = custom_op(
        f"{name}_backward(Tensor grad, {_INPUTS}, Tensor top_k_weights, {_EXPERTS}, Tensor[] saved, {GATING},"
        f" bool input_grad, bool weight_grad, bool bias_grad) -> ({', '.join(['Tensor'] * len(Grads._fields))})",
        run_backward,
        _fake_backward,
    )

    def apply_forward(ctx: Any, x: Tensor, gate_up: Tensor, down: Tensor, index: Tensor, *rest: Any) -> Tensor:
        out, *saved = op(x, gate_up, down, index, *rest)
        ctx.save_for_backward(x, gate_up, down, *rest[:4], *saved)
        ctx.gating = rest[4:]
        ctx.set_materialize_grads(False)
        return out

    def apply_backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad
        if grad is None:
            return (None,) * len(needs)
        # Read only once: activation checkpointing recomputes at the first read and raises at the second.
        *inputs, up, gate_up_bias, down_bias = (saved := ctx.saved_tensors)[:7]
        wanted = Wanted(needs[0], needs[1] or needs[2] or needs[5], needs[6] or needs[7])
        grads = backward_op(grad, *inputs, up, gate_up_bias, down_bias, saved[7:], *ctx.gating, *wanted)
        kept = [g if needed else None for g, needed in zip(grads, (*needs[:3], *needs[4:8]), strict=True)]
        return *kept[:3], None, *kept[3:], *[None] * _OPTIONS

    function = autograd_function(name, apply_forward, apply_backward, forward.__module__)

    def apply(hidden_states: Tensor, experts: Experts, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            _reject_tangents(name, hidden_states, *experts, top_k_weights)
        return function(hidden_states, *experts[:2], top_k_index, top_k_weights, *experts[2:])

    return apply


def _reject_tangents(name: str, *arguments: Any) -> None:
    """Raise for forward-mode AD: operators of torch.library silently drop tangents."""
    if any(isinstance(x, Tensor) and unpack_dual(x).tangent is not None for x in arguments):
        raise KernelError(
            f"moe_experts: the kernel {name} has no forward-mode derivative",
            hint="set moe_implementation to eager, or use reverse-mode differentiation",
        )


def _each(wanted: Wanted) -> tuple[bool, ...]:
    """`wanted` for every field of `Grads`."""
    return (wanted.inputs, wanted.weights, wanted.weights, True, wanted.weights, wanted.biases, wanted.biases)


def on_its_device(function: Callable[..., Any], tensor: Tensor, *rest: Any) -> Any:
    """Kernels launch on the current GPU, which may not be that of the tensors if a model spans several GPUs."""
    if tensor.device.type != "cuda":
        return function(tensor, *rest)
    with torch.cuda.device(tensor.device):
        return function(tensor, *rest)


def _fake_backward(
    grad: Tensor, x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, *rest: Any
) -> tuple[Tensor | None, ...]:
    return empty_gradients((x, gate_up, down, weights, *rest[:3]), _each(Wanted(*rest[-3:])))
