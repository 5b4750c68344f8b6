"""Experts with frozen weights and low-rank adapters (LoRA): the adapters are grouped GEMMs beside those of the weights.

An expert's weight W, as a matrix from inputs to outputs, acts as W + D U with factors D [E, inputs, r] and
U [E, r, outputs]. The sum is never formed, so a step has no copy and no gradient of the size of the weights.

A kernel that serves adapters has the attribute `with_adapters`: its contract with all arguments given, followed by the
two factors of each of its weights in their order, or None and None. The product of the factors has the layout of the
weight: for [E, outputs, inputs] they are U^T [E, outputs, r] and D^T [E, r, inputs].
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from opslot.ops._common.custom_op import differentiable_op
from opslot.ops.moe_experts._autograd import GATING, TENSORS, on_its_device
from opslot.ops.moe_experts._gating import activate_backward, activate_parts, halves_of, row_dots
from opslot.ops.moe_experts.contract import Contract, Experts, variants

Factors = tuple[Tensor, Tensor] | None


class ExpertRows(Protocol):
    """Token-expert pairs sorted by expert, as the rows of grouped GEMMs.

    R is the number of rows, of which some may be padding; P is the number of pairs.

    Attributes:
        pair: [R] int64, the pair (token * K + k) of each row; any pair for padding.
        is_pair: [R] bool, False for padding.
        expert: [R] int64, the expert of each row; any expert for padding.
    """

    pair: Tensor
    is_pair: Tensor
    expert: Tensor

    def gemm(self, rows: Tensor, weight: Tensor) -> Tensor:
        """[R, N]: each row of `rows` [R, M] times its expert's matrix in `weight` [E, M, N], of any strides."""

    def weight_grad(self, left: Tensor, right: Tensor) -> Tensor:
        """[E, M, N]: left^T right over each expert's rows of `left` [R, M] and `right` [R, N]."""

    def combine(self, rows: Tensor, weights: Tensor, weighted: bool) -> Tensor:
        """[T, H]: the sum of each token's rows [R, H], times the routing weights [T, K] if `weighted`."""


Sort = Callable[[Tensor, Tensor, Experts], ExpertRows]


def add_adapters(
    name: str,
    contracts: Sequence[Contract],
    prepare: Callable[[Tensor, Experts, Tensor, Tensor], tuple[Tensor, Experts]],
    sort: Sort,
    count_rows: Callable[[Tensor, Experts], int],
) -> None:
    """Give the kernels, the outputs of `variants`, their attribute `with_adapters`.

    Args:
        name: of the kernels; the custom op is opslot::moe_<name>_adapters.
        prepare: checks the arguments and casts tokens and experts.
        sort: (hidden_states, top_k_index, experts) -> the rows.
        count_rows: (top_k_index, experts) -> the number of rows, also for fake tensors.
    """
    function = _differentiable(name, sort, count_rows)
    for pack, contract in zip(_PACKERS, contracts, strict=True):
        contract.with_adapters = _Adapted(pack, prepare, function)  # type: ignore[attr-defined]


# The arguments of each variant as (hidden_states, experts, top_k_index, top_k_weights).
_PACKERS: Sequence[Callable[..., Any]] = variants(lambda *arguments: arguments)  # type: ignore[arg-type]


class _Adapted:
    def __init__(self, pack: Callable[..., Any], prepare: Callable[..., Any], function: Callable[..., Tensor]) -> None:
        self._pack, self._prepare, self._function = pack, prepare, function

    def __call__(self, hidden_states: Tensor, *arguments: Any) -> Tensor:
        weights = next(i for i, value in enumerate(arguments) if not value.is_floating_point())
        arguments, factors = arguments[: -2 * weights], arguments[-2 * weights :]
        given, experts, index, routing = self._pack(hidden_states, *arguments)
        x, experts = self._prepare(given, experts, index, routing)
        pairs = [_padded(a, b, x.dtype) for a, b in zip(factors[::2], factors[1::2], strict=True)]
        if experts.up_proj is None:
            pairs.insert(1, (None, None))
        flat = [factor for pair in pairs for factor in pair]
        return self._function(x, *experts[:2], routing, *experts[2:5], *flat, index, *experts[5:]).to(given.dtype)


def _padded(first: Tensor | None, second: Tensor | None, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """Factors whose rank is a multiple of 8: grouped GEMMs need rows of a multiple of 16 bytes."""
    if first is None or second is None:
        return None, None
    extra = -second.shape[1] % 8
    first, second = F.pad(first, (0, extra)), F.pad(second, (0, 0, 0, extra))
    return first.to(dtype).contiguous(), second.to(dtype).contiguous()


class _Call(NamedTuple):
    """One call of the op; `factors` are those of `experts.gate_up_weights` and of `down_proj`."""

    x: Tensor
    experts: Experts
    weights: Tensor
    factors: Sequence[Factors]
    rows: ExpertRows

    @property
    def token(self) -> Tensor:
        """The token index of each row, [R]."""
        return self.rows.pair // self.weights.shape[1]


# Two factors of up to three weights.
_FACTORS = ("gate_up_a", "gate_up_b", "up_a", "up_b", "down_a", "down_b")
_INPUTS = f"{TENSORS}, {', '.join(f'Tensor? {factor}' for factor in _FACTORS)}, Tensor top_k_index"
_TENSORS = _INPUTS.count(", ") + 1


def _differentiable(name: str, sort: Sort, count_rows: Callable[[Tensor, Experts], int]) -> Callable[..., Tensor]:
    """Register opslot::moe_<name>_adapters and its backward; returns the function of their flat arguments."""

    def call(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, *rest: Any) -> _Call:
        factors, index = rest[3:9], rest[9]
        experts = Experts(gate_up, down, *rest[:3], *rest[10:])
        pairs: list[Factors] = [None if a is None else (a, b) for a, b in zip(factors[::2], factors[1::2], strict=True)]
        if experts.up_proj is None:
            del pairs[1]
        return _Call(x, experts, weights, pairs, sort(x, index, experts))

    def fake(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        experts = Experts(gate_up, down, *rest[:3], *rest[10:])
        rows, width = count_rows(rest[9], experts), experts.halves * experts.sizes[2]
        up = x.new_empty(0 if experts.up_proj is None else (rows, width))
        return torch.empty_like(x, memory_format=torch.contiguous_format), x.new_empty(rows, width), up

    def run_backward(grad: Tensor, *arguments: Any) -> Any:
        inputs, parts, rest = arguments[:_TENSORS], arguments[_TENSORS : _TENSORS + 2], arguments[_TENSORS + 2 :]
        gating, needs = rest[: 1 - _TENSORS], rest[1 - _TENSORS :]
        found = _backward(grad.contiguous(), call(*inputs, *gating), parts, needs)
        return tuple([g if need else None for g, need in zip(found, needs, strict=True)])

    return differentiable_op(
        f"moe_{name}_adapters({_INPUTS}, {GATING}) -> (Tensor out, Tensor gate_up, Tensor up)",
        allocate=fake,
        launch=functools.partial(on_its_device, lambda *arguments: _forward(call(*arguments))),
        launch_backward=functools.partial(on_its_device, run_backward),
        in_place=False,
        module=sort.__module__,
        differentiable=_TENSORS - 1,
        kept=(*[tensor.split()[1] for tensor in _INPUTS.split(", ")], "gate_up", "up"),
        returned=1,
    )


def _forward(call: _Call) -> tuple[Tensor, Tensor, Tensor]:
    """The output, and the outputs of the first GEMMs for backward."""
    experts, rows = call.experts, call.rows
    *firsts, down = call.factors
    tokens = call.x[call.token]
    parts = [
        _linear(rows, tokens, weight, factors, experts.transposed)
        for weight, factors in zip(experts.gate_up_weights, firsts, strict=True)
    ]
    if experts.gate_up_bias is not None:
        parts[0] += experts.gate_up_bias[rows.expert]
    act = activate_parts(*halves_of(tuple(parts), experts), experts)
    out = _linear(rows, act, experts.down_proj, down, experts.down_transposed)
    if experts.down_bias is not None:
        out += experts.down_bias[rows.expert]
    gate_up, up, *_ = (*parts, call.x.new_empty(0))
    return rows.combine(out, call.weights.contiguous(), True), gate_up, up


def _backward(grad: Tensor, call: _Call, parts: tuple[Tensor, Tensor], wanted: Sequence[bool]) -> list[Tensor | None]:
    """Gradients of x, the weights, routing weights and biases, and the factors. Padding may hold anything, also NaN."""
    x, experts, weights, (*firsts, down), rows = call
    want_x, want_gate_up, want_down, _, want_up, want_gate_up_bias, want_down_bias = wanted[:7]
    row_grad = grad[call.token]
    scales = weights.reshape(-1)[rows.pair].masked_fill(~rows.is_pair, 0).unsqueeze(-1).to(x.dtype)
    gate, up = halves_of(parts[: len(firsts)], experts)
    by_act = _by_inputs(rows, row_grad, experts.down_proj, down, experts.down_transposed)
    parts_grad, weighted_act, dots = activate_backward(gate, up, by_act, scales, experts)
    down_grad, down_factors = _by_weight(
        rows, weighted_act, row_grad, experts.down_proj, down, experts.down_transposed, want_down
    )
    if experts.down_bias is not None:
        dots += row_dots(row_grad, experts.down_bias[rows.expert])
    weights_grad = torch.zeros_like(weights, dtype=dots.dtype).view(-1)
    weights_grad.index_add_(0, rows.pair, dots.masked_fill(~rows.is_pair, 0))
    tokens = x[call.token]
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
        None if by_tokens is None else rows.combine(by_tokens, weights.contiguous(), False),
        weight_grads[0],
        down_grad,
        weights_grad.view_as(weights).to(weights.dtype),
        weight_grads[1],
        _bias_grad(rows, parts_grad[0], experts.gate_up_bias) if want_gate_up_bias else None,
        _bias_grad(rows, row_grad * scales, experts.down_bias) if want_down_bias else None,
        *factor_grads,
        *down_factors,
    ]


def _bias_grad(rows: ExpertRows, grad: Tensor, bias: Tensor | None) -> Tensor | None:
    if bias is None:
        return None
    dtype = torch.promote_types(bias.dtype, torch.float32)
    kept = grad.to(dtype).masked_fill(~rows.is_pair.unsqueeze(-1), 0)
    return torch.zeros_like(bias, dtype=dtype).index_add_(0, rows.expert, kept).to(bias.dtype)


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

    def stored(grad: Tensor) -> Tensor:
        return grad if transposed else grad.mT.contiguous()

    by_weight = stored(rows.weight_grad(inputs, grad)) if want_weight else None
    if down is None or up is None:
        return by_weight, [None, None]
    by_down = stored(rows.weight_grad(inputs, rows.gemm(grad, up.mT)))
    by_up = stored(rows.weight_grad(rows.gemm(inputs, down), grad))
    return by_weight, [by_down, by_up] if transposed else [by_up, by_down]
