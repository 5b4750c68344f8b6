"""Experts in plain torch around grouped GEMMs over rows sorted by expert, with low-rank adapters (LoRA) or without.

An expert's weight W, as a matrix from inputs to outputs, with an adapter acts as W + D U with factors D [E, inputs, r]
and U [E, r, outputs]. The sum is never formed. The product of the factors has the layout of the weight: for
[E, outputs, inputs] they are U^T [E, outputs, r] and D^T [E, r, inputs].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from opslot.ops.moe_experts._gating import Parts, activate_backward, activate_parts, halves_of, row_dots
from opslot.ops.moe_experts.contract import Experts

Factors = tuple[Tensor, Tensor] | None


class ExpertRows(Protocol):
    """Token-expert pairs sorted by expert, as the rows of grouped GEMMs.

    R is the number of rows, of which some may be padding; P is the number of pairs.
    """

    @property
    def pair(self) -> Tensor:
        """[R] int64, the pair (token * K + k) of each row; any pair for padding."""

    @property
    def is_pair(self) -> Tensor:
        """[R] bool, False for padding."""

    @property
    def expert(self) -> Tensor:
        """[R] int64, the expert of each row; any expert for padding."""

    def gemm(self, rows: Tensor, weight: Tensor) -> Tensor:
        """[R, N]: each row of `rows` [R, M] times its expert's matrix in `weight` [E, M, N], of any strides."""

    def weight_grad(self, left: Tensor, right: Tensor) -> Tensor:
        """[E, M, N]: left^T right over each expert's rows of `left` [R, M] and `right` [R, N]."""

    def combine(self, rows: Tensor, weights: Tensor, weighted: bool) -> Tensor:
        """[T, H]: the sum of each token's rows [R, H], times the routing weights [T, K] if `weighted`."""


class ExpertsCall(NamedTuple):
    """One call of experts; `factors` are those of `experts.gate_up_weights` and of `down_proj`."""

    x: Tensor
    experts: Experts
    weights: Tensor
    factors: Sequence[Factors]
    rows: ExpertRows

    @property
    def token(self) -> Tensor:
        """The token index of each row, [R]."""
        return self.rows.pair // self.weights.shape[1]


def saved_parts(parts: Parts) -> tuple[Tensor, Tensor]:
    """What backward needs of the first GEMMs: an operator must return the same number of tensors for every variant."""
    return parts[0], parts[1] if len(parts) > 1 else parts[0].new_empty(0)


def forward(call: ExpertsCall) -> tuple[Tensor, Tensor, Tensor]:
    """The output, and the outputs of the first GEMMs for backward."""
    experts, rows = call.experts, call.rows
    *firsts, down = call.factors
    tokens = call.x[call.token]
    parts = tuple(
        [
            _linear(rows, tokens, weight, factors, experts.transposed)
            for weight, factors in zip(experts.gate_up_weights, firsts, strict=True)
        ]
    )
    if experts.gate_up_bias is not None:
        parts[0].add_(experts.gate_up_bias[rows.expert])
    act = activate_parts(*halves_of(parts, experts), experts)
    out = _linear(rows, act, experts.down_proj, down, experts.down_transposed)
    if experts.down_bias is not None:
        out += experts.down_bias[rows.expert]
    return rows.combine(out, call.weights, True), *saved_parts(parts)


def backward(grad: Tensor, call: ExpertsCall, parts: Sequence[Tensor], wanted: Sequence[bool]) -> list[Tensor | None]:
    """Gradients of x, the weights, routing weights and biases, and the factors.

    Rows after those of the last expert may hold anything, also NaN.

    Args:
        parts: the outputs of `forward` after the first.
        wanted: which gradients, in the order of `Grads`.
    """
    x, experts, weights, (*firsts, down), rows = call
    want_x, want_gate_up, want_down, _, want_up, want_gate_up_bias, want_down_bias = wanted
    row_grad, padding = grad[call.token], ~rows.is_pair
    scales = weights.reshape(-1)[rows.pair].masked_fill(padding, 0).unsqueeze(-1).to(x.dtype)
    gate, up = halves_of(tuple(parts[: len(firsts)]), experts)
    by_act = _by_inputs(rows, row_grad, experts.down_proj, down, experts.down_transposed)
    parts_grad, weighted_act, dots = activate_backward(gate, up, by_act, scales, experts)
    down_grad, down_factors = _by_weight(
        rows, weighted_act, row_grad, experts.down_proj, down, experts.down_transposed, want_down
    )
    if experts.down_bias is not None:
        dots += row_dots(row_grad, experts.down_bias[rows.expert])
    weights_grad = dots.new_zeros(weights.numel()).index_add_(0, rows.pair, dots.masked_fill(padding, 0))
    tokens = x[call.token] if want_gate_up or want_up or any(firsts) else x
    by_tokens = None
    weight_grads: list[Tensor | None] = []
    factor_grads: list[Tensor | None] = []
    for part, weight, factors, wants in zip(
        parts_grad, experts.gate_up_weights, firsts, (want_gate_up, want_up), strict=False
    ):
        if want_x:
            by_input = _by_inputs(rows, part, weight, factors, experts.transposed)
            by_tokens = by_input if by_tokens is None else by_tokens.add_(by_input)
        weight_grad, by_factors = _by_weight(rows, tokens, part, weight, factors, experts.transposed, wants)
        weight_grads.append(weight_grad)
        factor_grads += by_factors
    if experts.up_proj is None:
        weight_grads.append(None)
        factor_grads += [None, None]
    return [
        None if by_tokens is None else rows.combine(by_tokens, weights, False),
        weight_grads[0],
        down_grad,
        weights_grad.view(weights.shape).to(weights.dtype),
        weight_grads[1],
        _bias_grad(rows, scales.new_ones(scales.shape), parts_grad[0]) if want_gate_up_bias else None,
        _bias_grad(rows, scales, row_grad) if want_down_bias else None,
        *factor_grads,
        *down_factors,
    ]


def _bias_grad(rows: ExpertRows, scales: Tensor, grad: Tensor) -> Tensor:
    """Sums over each expert's scaled rows as a GEMM, with 8 equal columns, the minimum size of an operand."""
    return rows.weight_grad(scales.repeat(1, 8), grad)[:, 0].contiguous()


def _columns_last(weight: Tensor, factors: Factors, transposed: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The weight as [E, inputs, outputs], and its factors as [E, inputs, r] and [E, r, outputs]."""
    first, second = factors or (None, None)
    if transposed:
        return weight, first, second
    return weight.mT, None if second is None else second.mT, None if first is None else first.mT


def _linear(rows: ExpertRows, inputs: Tensor, weight: Tensor, factors: Factors, transposed: bool) -> Tensor:
    matrix, down, up = _columns_last(weight, factors, transposed)
    out = rows.gemm(inputs, matrix)
    if down is not None and up is not None:
        out += rows.gemm(rows.gemm(inputs, down), up)
    return out


def _by_inputs(rows: ExpertRows, grad: Tensor, weight: Tensor, factors: Factors, transposed: bool) -> Tensor:
    """The gradient of `_linear` by its inputs."""
    matrix, down, up = _columns_last(weight, factors, transposed)
    out = rows.gemm(grad, matrix.mT)
    if down is not None and up is not None:
        out += rows.gemm(rows.gemm(grad, up.mT), down.mT)
    return out


def _by_weight(
    rows: ExpertRows,
    inputs: Tensor,
    grad: Tensor,
    weight: Tensor,
    factors: Factors,
    transposed: bool,
    want_weight: bool,
) -> tuple[Tensor | None, list[Tensor | None]]:
    """The gradients of `_linear` by its weight and its factors."""
    _, down, up = _columns_last(weight, factors, transposed)

    def stored(left: Tensor, right: Tensor) -> Tensor:
        return rows.weight_grad(left, right) if transposed else rows.weight_grad(right, left)

    by_weight = stored(inputs, grad) if want_weight else None
    if down is None or up is None:
        return by_weight, [None, None]
    by_down, by_up = stored(inputs, rows.gemm(grad, up.mT)), stored(rows.gemm(inputs, down), grad)
    return by_weight, [by_down, by_up] if transposed else [by_up, by_down]
