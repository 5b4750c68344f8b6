"""grouped_mm: sort token-expert pairs by expert, then one GEMM per expert and weight: grouped_mm on GPUs, mm on CPUs.

On CPU all GEMMs of an expert run while its rows are in cache, they write into the output directly, and combine is one
embedding_bag.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from opslot.ops.moe_experts._autograd import Grads, Wanted, differentiable
from opslot.ops.moe_experts._call import prepare
from opslot.ops.moe_experts._gating import (
    Parts,
    activate_backward,
    activate_parts,
    empty_parts,
    halves_of,
    row_dots,
)
from opslot.ops.moe_experts.contract import Experts, variants
from opslot.ops.moe_experts.low_rank import add_adapters

# Output [T, H]; gate and up of the sorted rows, [P, 2I] or, not gated, [P, I], and an empty tensor, or [P, I] each for
# separate weights; the
# pair of each row [P], token * K + k; the end of each expert's rows [E].
Outputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
# (rows [P, M], weights [E, M, N], ends) -> [P, N], or (rows [M, P], rows [P, N], ends) -> [E, M, N]
GroupedGemm = Callable[[Tensor, Tensor, Tensor], Tensor]


def _run(hidden_states: Tensor, experts: Experts, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """On any device and in any floating dtype. Deterministic."""
    x, experts = prepare("grouped_mm", hidden_states, experts, top_k_index, top_k_weights)
    return _experts(x, experts, top_k_index, top_k_weights).to(hidden_states.dtype)


class _SortedRows:
    """`ExpertRows` without padding between experts; rows after the last expert's end belong to other ranks."""

    def __init__(self, x: Tensor, index: Tensor, experts: Experts) -> None:
        self.pair, self._row, self._ends = _sort(index, experts.sizes[0])
        self.is_pair = torch.arange(len(self.pair), device=x.device) < self._ends[-1]
        self.expert = _owners(self.pair, self._ends)
        self._shape = index.shape
        self._segments = None if _has_grouped_mm(x, experts) else _segments(self._ends)

    def gemm(self, rows: Tensor, weight: Tensor) -> Tensor:
        if self._segments is None:
            return _torch_gemm(rows, weight, self._ends)
        out = rows.new_zeros(len(rows), weight.shape[2])
        for expert, mine in self._segments:
            torch.mm(rows[mine], weight[expert], out=out[mine])
        return out

    def weight_grad(self, left: Tensor, right: Tensor) -> Tensor:
        if self._segments is None:
            return _torch_gemm(left.t(), right, self._ends)
        out = left.new_zeros(len(self._ends), left.shape[1], right.shape[1])
        for expert, mine in self._segments:
            torch.mm(left[mine].t(), right[mine], out=out[expert])
        return out

    def combine(self, rows: Tensor, weights: Tensor, weighted: bool) -> Tensor:
        return _gather_sum(rows, self._row, weights if weighted else None, self._ends, self._shape)


standard, clamped, biased, split, transposed, ungated = variants(_run)
add_adapters(
    "grouped_mm",
    (standard, clamped, biased, split, transposed, ungated),
    functools.partial(prepare, "grouped_mm"),
    _SortedRows,
    lambda index, experts: index.numel(),
)


def _forward(x: Tensor, experts: Experts, index: Tensor, weights: Tensor) -> Outputs:
    if _has_grouped_mm(x, experts):
        return forward_grouped(_torch_gemm, x, experts, index, weights)
    return _forward_segments(x, experts, index, weights)


def fake(x: Tensor, experts: Experts, index: Tensor, weights: Tensor) -> Outputs:
    count = experts.sizes[0]
    return (
        torch.empty_like(x, memory_format=torch.contiguous_format),
        *_saved(empty_parts(x, experts, index.numel(), experts.sizes[2])),
        index.new_empty(index.numel(), dtype=torch.int64),
        index.new_empty(count, dtype=torch.int32),
    )


def _saved(parts: Parts) -> tuple[Tensor, Tensor]:
    """An operator must return the same number of tensors for every variant."""
    return (parts[0], parts[1] if len(parts) > 1 else parts[0].new_empty(0))


def _backward(
    grad: Tensor, x: Tensor, experts: Experts, weights: Tensor, saved: Sequence[Tensor], wanted: Wanted
) -> Grads:
    if _has_grouped_mm(x, experts):
        return backward_grouped(_torch_gemm, grad.contiguous(), x, experts, weights, saved, wanted)
    return _backward_segments(grad.contiguous(), x, experts, weights, saved, wanted)


def _has_grouped_mm(hidden_states: Tensor, experts: Experts) -> bool:
    """torch's grouped GEMM has fast kernels only for bf16 with rows aligned to 16 bytes on SM80 and newer."""
    if hidden_states.device.type != "cuda" or hidden_states.dtype != torch.bfloat16:
        return False
    aligned = all(width % 8 == 0 for width in experts.sizes[1:])
    return aligned and torch.cuda.get_device_capability(hidden_states.device) >= (8, 0)


_grouped = getattr(F, "grouped_mm", None) or torch._grouped_mm


def _torch_gemm(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    return _grouped(left, right, offs=ends)


def _sort(top_k_index: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """The pair (token * K + k) of each row, sorted by expert; the row of each pair; and the end of each expert's rows.

    Pairs with an index outside 0..E-1 come last.
    """
    index = top_k_index.reshape(-1)
    by_expert, order = torch.sort(index.masked_fill(index < 0, experts), stable=True)
    edges = torch.arange(experts, device=order.device, dtype=by_expert.dtype)
    return order, _inverse(order), torch.searchsorted(by_expert, edges, right=True, out_int32=True)


def _inverse(order: Tensor) -> Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    return inverse


def _gather_sum(rows: Tensor, pair_to_row: Tensor, weights: Tensor | None, ends: Tensor, shape: torch.Size) -> Tensor:
    """[T, H]: the sum over K of (weights *) each pair's row; rows after the last expert's end count as zero."""
    if rows.device.type == "cpu" and rows.dtype in (torch.float32, torch.bfloat16, torch.float16):
        rows[int(ends[-1]) :] = 0
        scales = None if weights is None else weights.to(rows.dtype)
        return F.embedding_bag(pair_to_row.view(shape), rows, mode="sum", per_sample_weights=scales)
    terms = rows[pair_to_row].view(*shape, rows.shape[1])
    dtype = torch.promote_types(rows.dtype, torch.float32)
    if weights is not None:
        terms = terms.to(dtype) * weights.unsqueeze(-1)
    terms = terms.masked_fill((pair_to_row.view(shape) >= ends[-1]).unsqueeze(-1), 0)
    return terms.sum(1, dtype=dtype).to(rows.dtype)


def forward_grouped(gemm: GroupedGemm, x: Tensor, experts: Experts, index: Tensor, weights: Tensor) -> Outputs:
    order, pair_to_row, ends = _sort(index, experts.sizes[0])
    parts = _gate_up(gemm, x[order // index.shape[1]], experts, ends)
    if experts.gate_up_bias is not None:
        parts[0].add_(experts.gate_up_bias[_owners(order, ends)])
    rows = gemm(activate_parts(*halves_of(parts, experts), experts), _columns_last_down(experts), ends)
    if experts.down_bias is not None:
        rows += experts.down_bias[_owners(order, ends)]
    return _gather_sum(rows, pair_to_row, weights, ends, index.shape), *_saved(parts), order, ends


def backward_grouped(
    gemm: GroupedGemm,
    grad: Tensor,
    x: Tensor,
    experts: Experts,
    weights: Tensor,
    saved: Sequence[Tensor],
    wanted: Wanted,
) -> Grads:
    """`saved`: the outputs of `forward_grouped` after the first."""
    gate_up, up, order, ends = saved
    token = order // weights.shape[1]
    mine = torch.arange(order.numel(), device=order.device) < ends[-1]
    row_grad = grad[token]
    act_grad = gemm(row_grad, _columns_last_down(experts).transpose(1, 2), ends)
    scales = weights.reshape(-1)[order].unsqueeze(-1).to(x.dtype)
    halves = halves_of((gate_up, up)[: len(experts.gate_up_weights)], experts)
    parts_grad, weighted_act, dots = activate_backward(*halves, act_grad, scales, experts)
    if experts.down_bias is not None:
        dots += row_dots(row_grad, experts.down_bias[_owners(order, ends)])
    weights_grad = weights.new_zeros(weights.numel())
    weights_grad[order] = torch.where(mine, dots, 0.0).to(weights.dtype)
    x_grad = gate_up_grad = up_grad = down_grad = gate_up_bias_grad = down_bias_grad = None
    if wanted.inputs:
        rows = _tokens_grad(gemm, parts_grad, experts, ends)
        x_grad = _gather_sum(rows, _inverse(order), None, ends, weights.shape)
    if wanted.weights:
        gate_up_grad, up_grad = _pair(_gate_up_grads(gemm, parts_grad, x[token], experts, ends))
        down_grad = gemm(*_weight_grad_operands(row_grad, weighted_act, experts.down_transposed), ends)
    if experts.biased and wanted.biases:
        # Also computes sums over an expert's rows as a GEMM, with 8 equal rows, the minimum size of an operand.
        ones, repeated = torch.ones_like(scales).repeat(1, 8), scales.repeat(1, 8)
        gate_up_bias_grad = gemm(ones.t(), parts_grad[0], ends)[:, 0].contiguous()
        down_bias_grad = gemm(repeated.t(), row_grad, ends)[:, 0].contiguous()
    weights_grad = weights_grad.view_as(weights)
    return Grads(x_grad, gate_up_grad, down_grad, weights_grad, up_grad, gate_up_bias_grad, down_bias_grad)


def _gate_up(gemm: GroupedGemm, tokens: Tensor, experts: Experts, ends: Tensor) -> Parts:
    return tuple(gemm(tokens, _columns_last(w, experts), ends) for w in experts.gate_up_weights)


def _tokens_grad(gemm: GroupedGemm, parts_grad: Parts, experts: Experts, ends: Tensor) -> Tensor:
    weights = (_columns_last(w, experts).transpose(1, 2) for w in experts.gate_up_weights)
    rows, *others = (gemm(part, weight, ends) for part, weight in zip(parts_grad, weights, strict=True))
    for other in others:  # torch's grouped GEMM cannot accumulate into an output
        rows += other
    return rows


def _gate_up_grads(
    gemm: GroupedGemm, parts_grad: Parts, tokens: Tensor, experts: Experts, ends: Tensor
) -> Sequence[Tensor]:
    return [gemm(*_weight_grad_operands(part, tokens, experts.transposed), ends) for part in parts_grad]


def _pair(grads: Sequence[Tensor]) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of `gate_up_proj` and `up_proj`."""
    first, second, *_ = (*grads, None, None)
    return first, second


def _columns_last(weight: Tensor, experts: Experts) -> Tensor:
    """A weight of the first GEMM as [E, H, outputs]."""
    return weight if experts.transposed else weight.transpose(1, 2)


def _columns_last_down(experts: Experts) -> Tensor:
    """The weight of the second GEMM as [E, I, H]."""
    return experts.down_proj if experts.down_transposed else experts.down_proj.transpose(1, 2)


def _weight_grad_operands(outputs_grad: Tensor, inputs: Tensor, transposed: bool) -> tuple[Tensor, Tensor]:
    """The operands of a weight's gradient GEMM, in the order that gives the weight's layout."""
    return (inputs.t(), outputs_grad) if transposed else (outputs_grad.t(), inputs)


def _owners(order: Tensor, ends: Tensor) -> Tensor:
    """The expert of each sorted row; the last expert for rows without one."""
    rows = torch.arange(order.numel(), device=order.device, dtype=ends.dtype)
    return torch.searchsorted(ends, rows, right=True).clamp_(max=ends.numel() - 1)


def _segments(ends: Tensor) -> list[tuple[int, slice]]:
    """(expert, its rows) for the experts that have rows."""
    found, start = [], 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            found.append((expert, slice(start, end)))
        start = end
    return found


def _forward_segments(x: Tensor, experts: Experts, index: Tensor, weights: Tensor) -> Outputs:
    order, pair_to_row, ends = _sort(index, experts.sizes[0])
    token = order // index.shape[1]
    parts = empty_parts(x, experts, order.numel(), experts.sizes[2])
    gate, up = halves_of(parts, experts)
    rows = x.new_empty(order.numel(), x.shape[1])
    up_weights, down = [_columns_last(w, experts) for w in experts.gate_up_weights], _columns_last_down(experts)
    for expert, mine in _segments(ends):
        tokens = x[token[mine]]
        for weight, part in zip(up_weights, parts, strict=True):
            _linear(tokens, weight[expert], experts.gate_up_bias, expert, part[mine])
        _linear(activate_parts(gate[mine], up[mine], experts), down[expert], experts.down_bias, expert, rows[mine])
    return _gather_sum(rows, pair_to_row, weights, ends, index.shape), *_saved(parts), order, ends


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, expert: int, out: Tensor) -> None:
    if bias is None:
        torch.mm(x, weight, out=out)
    else:
        torch.addmm(bias[expert], x, weight, out=out)


def _backward_segments(
    grad: Tensor, x: Tensor, experts: Experts, weights: Tensor, saved: Sequence[Tensor], wanted: Wanted
) -> Grads:
    gate_up, up, order, ends = saved
    token = order // weights.shape[1]
    scales = weights.reshape(-1)[order].unsqueeze(-1).to(x.dtype)
    weights_grad = weights.new_zeros(weights.numel())
    segments = _segments(ends)
    whole = len(segments) == experts.sizes[0]
    fresh = torch.empty_like if whole else torch.zeros_like
    gate_up_grads = [fresh(w, memory_format=torch.contiguous_format) for w in experts.gate_up_weights if wanted.weights]
    down_grad = fresh(experts.down_proj, memory_format=torch.contiguous_format) if wanted.weights else None
    gate_up_bias_grad, down_bias_grad = (
        fresh(b) if b is not None and wanted.biases else None for b in (experts.gate_up_bias, experts.down_bias)
    )
    up_weights, down = [_columns_last(w, experts) for w in experts.gate_up_weights], _columns_last_down(experts)
    gate, up = halves_of((gate_up, up)[: len(up_weights)], experts)
    rows = x.new_empty(order.numel() if wanted.inputs else 0, x.shape[1])
    for expert, mine in segments:
        row_grad = grad[token[mine]]
        act_grad = torch.mm(row_grad, down[expert].t())
        parts_grad, weighted_act, dots = activate_backward(gate[mine], up[mine], act_grad, scales[mine], experts)
        if experts.down_bias is not None:
            dots += row_dots(row_grad, experts.down_bias[expert])
        weights_grad[order[mine]] = dots.to(weights.dtype)
        if down_grad is not None:
            tokens = x[token[mine]]
            torch.mm(*_weight_grad_operands(row_grad, weighted_act, experts.down_transposed), out=down_grad[expert])
            for part, out in zip(parts_grad, gate_up_grads, strict=True):
                torch.mm(*_weight_grad_operands(part, tokens, experts.transposed), out=out[expert])
        if gate_up_bias_grad is not None and down_bias_grad is not None:
            torch.sum(parts_grad[0], 0, out=gate_up_bias_grad[expert])
            torch.mm(scales[mine].t(), row_grad, out=down_bias_grad[expert : expert + 1])
        if wanted.inputs:
            row = torch.mm(parts_grad[0], up_weights[0][expert].t(), out=rows[mine])
            for part, weight in zip(parts_grad[1:], up_weights[1:], strict=True):
                row.addmm_(part, weight[expert].t())
    x_grad = None
    if wanted.inputs:
        x_grad = _gather_sum(rows, _inverse(order), None, ends, weights.shape)
    gate_up_grad, up_grad = _pair(gate_up_grads)
    weights_grad = weights_grad.view_as(weights)
    return Grads(x_grad, gate_up_grad, down_grad, weights_grad, up_grad, gate_up_bias_grad, down_bias_grad)


_experts = differentiable("moe_grouped_mm", _forward, _backward, fake)
