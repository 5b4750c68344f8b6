"""Experts with frozen weights and low-rank adapters (LoRA): the adapters are grouped GEMMs beside those of the weights.

An expert's weight W, as a matrix from inputs to outputs, acts as W + D U with factors D [E, inputs, r] and
U [E, r, outputs]. The sum is never formed, so a step has no copy and no gradient of the size of the weights.

A kernel that serves adapters has the attribute `with_adapters`: its contract with all arguments given, followed by the
two factors of each of its weights in their order, or None and None. The product of the factors has the layout of the
weight: for [E, outputs, inputs] they are U^T [E, outputs, r] and D^T [E, r, inputs].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from opslot.ops._common.activations import activate
from opslot.ops._common.custom_op import once_differentiable
from opslot.ops.moe_experts._autograd import Experts
from opslot.ops.moe_experts._call import Contract, Run, variants
from opslot.ops.moe_experts.op import gated

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


def add_adapters(
    contracts: Sequence[Contract],
    prepare: Callable[[Tensor, Experts, Tensor, Tensor], tuple[Tensor, Experts]],
    sort: Callable[[Tensor, Tensor, Experts], ExpertRows],
) -> None:
    """Give the kernels, the outputs of `variants`, their attribute `with_adapters`.

    Args:
        prepare: checks the arguments and casts tokens and experts.
        sort: (hidden_states, top_k_index, experts) -> the rows.
    """
    for number, contract in enumerate(contracts):
        contract.with_adapters = _Adapted(number, prepare, sort)  # type: ignore[attr-defined]


class _Adapted:
    def __init__(self, number: int, prepare: Callable[..., Any], sort: Callable[..., ExpertRows]) -> None:
        self._number, self._prepare, self._sort = number, prepare, sort

    @torch.compiler.disable
    def __call__(self, hidden_states: Tensor, *arguments: Any) -> Tensor:
        weights = next(i for i, value in enumerate(arguments) if not value.is_floating_point())
        arguments, factors = arguments[: -2 * weights], arguments[-2 * weights :]
        pairs = [None if a is None else (a, b) for a, b in zip(factors[::2], factors[1::2], strict=True)]
        return variants(self._run_with(pairs))[self._number](hidden_states, *arguments)

    def _run_with(self, pairs: Sequence[Factors]) -> Run:
        def run(hidden_states: Tensor, experts: Experts, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            x, experts = self._prepare(hidden_states, experts, top_k_index, top_k_weights)
            with torch.autocast(x.device.type, enabled=False):
                rows = self._sort(x, top_k_index, experts)
                return _experts(rows, x, experts, pairs, top_k_weights).to(hidden_states.dtype)

        return run


def _experts(rows: ExpertRows, x: Tensor, experts: Experts, pairs: Sequence[Factors], weights: Tensor) -> Tensor:
    tokens = _Dispatch.apply(x, rows, weights)
    *firsts, down = pairs
    parts = [
        _linear(rows, tokens, weight, factors, experts.transposed)
        for weight, factors in zip(experts.gate_up_weights, firsts, strict=True)
    ]
    if experts.gate_up_bias is not None:
        parts[0] = parts[0] + experts.gate_up_bias[rows.expert]
    out = _linear(rows, _act(parts, experts), experts.down_proj, down, experts.down_transposed)
    if experts.down_bias is not None:
        out = out + experts.down_bias[rows.expert]
    return _Combine.apply(out, weights, rows)


def _act(parts: Sequence[Tensor], experts: Experts) -> Tensor:
    if not experts.gated:
        return activate(experts.activation, parts[0])
    gate, up = _halves(parts, experts)
    return gated(
        gate,
        up,
        experts.limit,
        experts.alpha,
        experts.up_offset,
        clamps_activation=experts.clamps_activation,
        activation=experts.activation,
    )


def _halves(parts: Sequence[Tensor], experts: Experts) -> Sequence[Tensor]:
    if len(parts) == 2:
        return parts
    return (parts[0][:, ::2], parts[0][:, 1::2]) if experts.biased else parts[0].chunk(2, dim=-1)


def _linear(rows: ExpertRows, inputs: Tensor, weight: Tensor, factors: Factors, transposed: bool) -> Tensor:
    # As [E, inputs, outputs].
    out = _Gemm.apply(inputs, weight if transposed else weight.mT, rows)
    if factors is None:
        return out
    # Grouped GEMMs need rows of a multiple of 16 bytes.
    extra = -factors[1].shape[1] % 8
    first, second = F.pad(factors[0], (0, extra)), F.pad(factors[1], (0, 0, 0, extra))
    down, up = (t.to(inputs.dtype).contiguous() for t in (first, second))
    if not transposed:
        down, up = up.mT, down.mT
    return out + _Gemm.apply(_Gemm.apply(inputs, down, rows), up, rows)


class _Gemm(torch.autograd.Function):
    """A grouped GEMM of rows [R, M] and weights [E, M, N]."""

    @staticmethod
    def forward(ctx: Any, left: Tensor, weight: Tensor, rows: ExpertRows) -> Tensor:
        ctx.rows = rows
        ctx.save_for_backward(left if ctx.needs_input_grad[1] else None, weight)
        return rows.gemm(left, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        left, weight = ctx.saved_tensors
        grad = grad.contiguous()
        left_grad = ctx.rows.gemm(grad, weight.mT) if ctx.needs_input_grad[0] else None
        return left_grad, None if left is None else ctx.rows.weight_grad(left, grad), None


class _Dispatch(torch.autograd.Function):
    """The token of each row, [R, H]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: ExpertRows, weights: Tensor) -> Tensor:
        ctx.rows = rows
        ctx.save_for_backward(weights)
        return x[rows.pair // weights.shape[1]]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.rows.combine(grad.contiguous(), *ctx.saved_tensors, False), None, None


class _Combine(torch.autograd.Function):
    """The sum over each token's rows, times their routing weights."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, weights: Tensor, rows: ExpertRows) -> Tensor:
        ctx.rows = rows
        ctx.save_for_backward(out, weights)
        return rows.combine(out, weights.contiguous(), True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        out, weights = ctx.saved_tensors
        rows = ctx.rows
        row_grad = grad[rows.pair // weights.shape[1]]
        dtype = torch.promote_types(out.dtype, torch.float32)
        dots = (row_grad * out).sum(-1, dtype=dtype).masked_fill(~rows.is_pair, 0)
        weights_grad = torch.zeros_like(weights, dtype=dtype).view(-1).index_add(0, rows.pair, dots)
        scales = weights.reshape(-1)[rows.pair].masked_fill(~rows.is_pair, 0)
        # Padding may hold anything, also NaN.
        row_grad = (row_grad * scales.unsqueeze(-1)).to(out.dtype)
        return row_grad, weights_grad.view_as(weights).to(weights.dtype), None
