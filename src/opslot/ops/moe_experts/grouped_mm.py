"""grouped_mm: tokens sorted by expert, then one product an expert and weight: torch's grouped_mm on GPUs, mm on CPUs.

On CPU each expert's rows are taken through all their products while they are in cache, the products write straight into
their places, and the weighted sum over a token's experts is one embedding_bag.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from opslot.ops.moe_experts._autograd import Grads, differentiable
from opslot.ops.moe_experts._call import prepare

# The output [T, H]; gate and up of the sorted rows [S, 2I]; their slots [S], token * K + choice; each expert's end [E].
Outputs = tuple[Tensor, Tensor, Tensor, Tensor]
# (rows [S, M], weights [E, M, N], ends) -> [S, N], or (rows [M, S], rows [S, N], ends) -> [E, M, N]
Product = Callable[[Tensor, Tensor, Tensor], Tensor]


def grouped_mm(
    hidden_states: Tensor, gate_up_proj: Tensor, down_proj: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The contract of `op.standard`, on any device and in any floating dtype. Deterministic."""
    x, gate_up, down = prepare("grouped_mm", hidden_states, gate_up_proj, down_proj, top_k_index, top_k_weights)
    output = _experts(x, gate_up, down, top_k_index, top_k_weights)
    return output.to(hidden_states.dtype)


def _forward(x: Tensor, gate_up_proj: Tensor, down_proj: Tensor, index: Tensor, weights: Tensor) -> Outputs:
    if _has_grouped_mm(x, down_proj):
        return forward_grouped(_torch_product, x, gate_up_proj, down_proj, index, weights)
    return _forward_segments(x, gate_up_proj, down_proj, index, weights)


def fake(x: Tensor, gate_up_proj: Tensor, down_proj: Tensor, index: Tensor, weights: Tensor) -> Outputs:
    return (
        torch.empty_like(x, memory_format=torch.contiguous_format),
        x.new_empty(index.numel(), gate_up_proj.shape[1]),
        index.new_empty(index.numel(), dtype=torch.int64),
        index.new_empty(gate_up_proj.shape[0], dtype=torch.int32),
    )


def _backward(
    grad: Tensor,
    x: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    weights: Tensor,
    saved: Sequence[Tensor],
    input_grad: bool,
    weight_grad: bool,
) -> Grads:
    arguments = (grad.contiguous(), x, gate_up_proj, down_proj, weights, *saved, input_grad, weight_grad)
    if _has_grouped_mm(x, down_proj):
        return backward_grouped(_torch_product, *arguments)
    return _backward_segments(*arguments)


def _has_grouped_mm(hidden_states: Tensor, down_proj: Tensor) -> bool:
    """torch's grouped product runs bf16 with 16-byte rows on SM80 and newer, and slower code of its own elsewhere."""
    if hidden_states.device.type != "cuda" or hidden_states.dtype != torch.bfloat16:
        return False
    aligned = all(width % 8 == 0 for width in down_proj.shape[1:])
    return aligned and torch.cuda.get_device_capability(hidden_states.device) >= (8, 0)


_grouped = getattr(F, "grouped_mm", None) or torch._grouped_mm


def _torch_product(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    return _grouped(left, right, offs=ends)


def _sort(top_k_index: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Slots (token * K + choice) in order of their experts, each slot's place in that order, and each expert's end."""
    by_expert, order = torch.sort(top_k_index.reshape(-1), stable=True)
    edges = torch.arange(experts, device=order.device, dtype=by_expert.dtype)
    return order, _inverse(order), torch.searchsorted(by_expert, edges, right=True, out_int32=True)


def _inverse(order: Tensor) -> Tensor:
    places = torch.empty_like(order)
    places[order] = torch.arange(order.numel(), device=order.device)
    return places


def _gather_sum(rows: Tensor, places: Tensor, weights: Tensor | None, ends: Tensor, shape: torch.Size) -> Tensor:
    """Sum over K of (weights *) the rows at `places`; rows after the last expert's end count as zero."""
    if rows.device.type == "cpu" and rows.dtype in (torch.float32, torch.bfloat16, torch.float16):
        rows[int(ends[-1]) :] = 0
        scales = None if weights is None else weights.to(rows.dtype)
        return F.embedding_bag(places.view(shape), rows, mode="sum", per_sample_weights=scales)
    terms = rows[places].view(*shape, rows.shape[1])
    wide = torch.promote_types(rows.dtype, torch.float32)
    if weights is not None:
        terms = terms.to(wide) * weights.unsqueeze(-1)
    terms = terms.masked_fill((places.view(shape) >= ends[-1]).unsqueeze(-1), 0)
    return terms.sum(1, dtype=wide).to(rows.dtype)


def forward_grouped(
    product: Product, x: Tensor, gate_up_proj: Tensor, down_proj: Tensor, index: Tensor, weights: Tensor
) -> Outputs:
    order, places, ends = _sort(index, gate_up_proj.shape[0])
    projected = product(x[order // index.shape[1]], gate_up_proj.transpose(1, 2), ends)
    gate, up = projected.chunk(2, dim=-1)
    rows = product(F.silu(gate) * up, down_proj.transpose(1, 2), ends)
    return _gather_sum(rows, places, weights, ends, index.shape), projected, order, ends


def backward_grouped(
    product: Product,
    grad: Tensor,
    x: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    weights: Tensor,
    projected: Tensor,
    order: Tensor,
    ends: Tensor,
    input_grad: bool,
    weight_grad: bool,
) -> Grads:
    token = order // weights.shape[1]
    mine = torch.arange(order.numel(), device=order.device) < ends[-1]
    row_grad = grad[token]
    act_grad = product(row_grad, down_proj, ends)
    scales = weights.reshape(-1)[order].unsqueeze(-1).to(x.dtype)
    projected_grad, weighted_act, dots = _swiglu_grad(projected, act_grad, scales)
    weights_grad = torch.zeros_like(weights).view(-1)
    weights_grad[order] = torch.where(mine, dots, 0.0).to(weights.dtype)
    x_grad = gate_up_grad = down_grad = None
    if input_grad:
        rows = product(projected_grad, gate_up_proj, ends)
        x_grad = _gather_sum(rows, _inverse(order), None, ends, weights.shape)
    if weight_grad:
        gate_up_grad = product(projected_grad.t(), x[token], ends)
        down_grad = product(row_grad.t(), weighted_act, ends)
    return x_grad, gate_up_grad, down_grad, weights_grad.view_as(weights)


def _swiglu_grad(projected: Tensor, act_grad: Tensor, scales: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of gate and up [S, 2I], scale * act [S, I], row dots of act and `act_grad`; overwrites `act_grad`."""
    intermediate = act_grad.shape[1]
    gate, up = projected.chunk(2, dim=-1)
    silu = F.silu(gate)
    act = silu * up
    dots = (act * act_grad).sum(-1, dtype=torch.promote_types(act.dtype, torch.float32))
    act_grad.mul_(scales)
    projected_grad = torch.empty_like(projected)
    torch.mul(act_grad, silu, out=projected_grad[:, intermediate:])
    torch.ops.aten.silu_backward(act_grad.mul_(up), gate, grad_input=projected_grad[:, :intermediate])
    return projected_grad, act.mul_(scales), dots


def _segments(ends: Tensor) -> list[tuple[int, slice]]:
    """(expert, its rows) of the experts that have any."""
    found, start = [], 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            found.append((expert, slice(start, end)))
        start = end
    return found


def _forward_segments(x: Tensor, gate_up_proj: Tensor, down_proj: Tensor, index: Tensor, weights: Tensor) -> Outputs:
    order, places, ends = _sort(index, gate_up_proj.shape[0])
    token = order // index.shape[1]
    projected = x.new_empty(order.numel(), gate_up_proj.shape[1])
    rows = x.new_empty(order.numel(), x.shape[1])
    for expert, part in _segments(ends):
        torch.mm(x[token[part]], gate_up_proj[expert].t(), out=projected[part])
        gate, up = projected[part].chunk(2, dim=-1)
        torch.mm(F.silu(gate).mul_(up), down_proj[expert].t(), out=rows[part])
    return _gather_sum(rows, places, weights, ends, index.shape), projected, order, ends


def _backward_segments(
    grad: Tensor,
    x: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    weights: Tensor,
    projected: Tensor,
    order: Tensor,
    ends: Tensor,
    input_grad: bool,
    weight_grad: bool,
) -> Grads:
    token = order // weights.shape[1]
    scales = weights.reshape(-1)[order].unsqueeze(-1).to(x.dtype)
    weights_grad = torch.zeros_like(weights).view(-1)
    segments = _segments(ends)
    whole = len(segments) == gate_up_proj.shape[0]
    fresh = torch.empty_like if whole else torch.zeros_like
    gate_up_grad = fresh(gate_up_proj) if weight_grad else None
    down_grad = fresh(down_proj) if weight_grad else None
    rows = x.new_empty(order.numel() if input_grad else 0, x.shape[1])
    for expert, part in segments:
        row_grad = grad[token[part]]
        act_grad = torch.mm(row_grad, down_proj[expert])
        projected_grad, weighted_act, dots = _swiglu_grad(projected[part], act_grad, scales[part])
        weights_grad[order[part]] = dots.to(weights.dtype)
        if weight_grad:
            torch.mm(row_grad.t(), weighted_act, out=down_grad[expert])
            torch.mm(projected_grad.t(), x[token[part]], out=gate_up_grad[expert])
        if input_grad:
            torch.mm(projected_grad, gate_up_proj[expert], out=rows[part])
    x_grad = None
    if input_grad:
        x_grad = _gather_sum(rows, _inverse(order), None, ends, weights.shape)
    return x_grad, gate_up_grad, down_grad, weights_grad.view_as(weights)


_experts = differentiable("moe_grouped_mm", _forward, _backward, fake)
