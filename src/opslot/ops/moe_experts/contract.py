"""The arguments of the variants of moe_experts, and the parameters that experts have in any of them.

Shapes: T tokens, K experts per token, E local experts, H hidden size, I intermediate size. `hidden_states` [T, H];
`gate_up_proj` [E, 2I, H], the first I rows of an expert being its gate; `down_proj` [E, H, I]; `top_k_index` [T, K]
integer; `top_k_weights` [T, K] in the activations' dtype or in float32. An index equal to E marks an expert of another
rank. Every variant takes the parameters as the module stores them, some in other layouts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from opslot.ops._common.activations import Activation


class Experts(NamedTuple):
    """The parameters of the local experts, and their gating.

    Attributes:
        gate_up_proj: [E, 2I, H], gate rows first; transposed [E, H, 2I], gate columns first, or with biases
            interleaved with those of up; with `up_proj` only the gate, [E, I, H]; not gated, the only one, [E, I, H].
        down_proj: [E, H, I]; transposed [E, I, H].
        up_proj: [E, I, H], or None if `gate_up_proj` has both.
        gate_up_bias, down_bias: [E, 2I] and [E, H], or None.
        limit, alpha, up_offset, clamps_activation: as in the variant clamped; without `limit` nothing is clamped.
        activation: what the caller gave, which `prepare` replaces by its name in `ACTIVATIONS`; with `alpha` it is
            "silu".
        gated: act(gate) * up; else act(up).
        transposed, down_transposed: the layouts of `gate_up_proj` and `down_proj`.
    """

    gate_up_proj: Tensor
    down_proj: Tensor
    up_proj: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    limit: float | None = None
    # Integers, since torch.compile(dynamic=True) makes symbols of floats, and fails at those of defaults.
    alpha: float = 1
    up_offset: float = 0
    activation: Any = "silu"
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


class ExpertsInputs(NamedTuple):
    """What all variants take."""

    hidden_states: Tensor
    experts: Experts
    top_k_index: Tensor
    top_k_weights: Tensor


# The arguments of the variants. All but the last compute gated experts (Shazeer 2020, section 2): the sum over a
# token's experts of weight * down(activation(gate x) * up x), [T, H] in the dtype of `hidden_states`.


def standard(
    hidden_states: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    activation: Activation = "silu",
) -> ExpertsInputs:
    """`gate_up_proj` [E, 2I, H], the first I rows of an expert being its gate; `down_proj` [E, H, I]."""
    experts = Experts(gate_up_proj, down_proj, activation=activation)
    return ExpertsInputs(hidden_states, experts, top_k_index, top_k_weights)


def clamped(
    hidden_states: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    limit: float,
    alpha: float = 1,
    up_offset: float = 0,
    clamps_activation: bool = False,
) -> ExpertsInputs:
    """Standard with a clamped gating: (u + up_offset) * g * sigmoid(alpha * g), g = min(gate, limit), u = up within
    -limit..limit; clamped values get no gradient.

    DeepSeek-V4's experts with the defaults, MiniMax-M3's with alpha 1.702 and up_offset 1. With
    `clamps_activation`, as in Step-3.7, gate * sigmoid(alpha * gate) is limited instead of gate. An infinite limit
    clamps nothing.
    """
    gating: dict[str, Any] = {"alpha": alpha, "up_offset": up_offset}
    if limit != math.inf:
        gating |= {"limit": limit, "clamps_activation": clamps_activation}
    return ExpertsInputs(hidden_states, Experts(gate_up_proj, down_proj, **gating), top_k_index, top_k_weights)


def biased(
    hidden_states: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_proj_bias: Tensor,
    down_proj_bias: Tensor,
    limit: float,
    alpha: float,
) -> ExpertsInputs:
    """gpt-oss's experts: clamped with up_offset 1, biases on both GEMMs, and transposed weights.

    `gate_up_proj` [E, H, 2I] and `gate_up_proj_bias` [E, 2I] with interleaved gate and up columns;
    `down_proj` [E, I, H]; `down_proj_bias` [E, H].
    """
    experts = Experts(
        gate_up_proj,
        down_proj,
        gate_up_bias=gate_up_proj_bias,
        down_bias=down_proj_bias,
        limit=limit,
        alpha=alpha,
        up_offset=1.0,
        transposed=True,
        down_transposed=True,
    )
    return ExpertsInputs(hidden_states, experts, top_k_index, top_k_weights)


def split(
    hidden_states: Tensor,
    gate_proj: Tensor,
    up_proj: Tensor,
    down_proj: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    activation: Activation = "silu",
) -> ExpertsInputs:
    """DBRX's experts: standard with separate tensors for gate and up; all three weights are [E, I, H]."""
    experts = Experts(gate_proj, down_proj, up_proj, activation=activation, down_transposed=True)
    return ExpertsInputs(hidden_states, experts, top_k_index, top_k_weights)


def transposed(
    hidden_states: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    activation: Activation = "silu",
) -> ExpertsInputs:
    """As in Aria and Llama 4: `gate_up_proj` [E, H, 2I], `down_proj` [E, I, H]."""
    experts = Experts(gate_up_proj, down_proj, activation=activation, transposed=True, down_transposed=True)
    return ExpertsInputs(hidden_states, experts, top_k_index, top_k_weights)


def ungated(
    hidden_states: Tensor,
    up_proj: Tensor,
    down_proj: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    activation: Activation = "silu",
) -> ExpertsInputs:
    """Experts without a gate, as in Nemotron 3: the sum of weight * down(activation(up x)), `up_proj` [E, I, H]."""
    experts = Experts(up_proj, down_proj, activation=activation, gated=False)
    return ExpertsInputs(hidden_states, experts, top_k_index, top_k_weights)


VARIANTS: tuple[Callable[..., ExpertsInputs], ...] = (standard, clamped, biased, split, transposed, ungated)
