"""grouped_mm: tokens sorted by expert, then one product an expert and weight: torch's grouped_mm on GPUs, mm on CPUs.

On CPU each expert's rows are taken through all their products while they are in cache, the products write straight into
their places, and the weighted sum over a token's experts is one embedding_bag.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from opslot.ops.moe_experts._autograd import Experts, Grads, Wanted, differentiable
from opslot.ops.moe_experts._call import prepare, variants

# The output [T, H]; gate and up of the sorted rows [S, 2I]; their slots [S], token * K + choice; each expert's end [E].
Outputs = tuple[Tensor, Tensor, Tensor, Tensor]
# (rows [S, M], weights [E, M, N], ends) -> [S, N], or (rows [M, S], rows [S, N], ends) -> [E, M, N]
Product = Callable[[Tensor, Tensor, Tensor], Tensor]


def _run(hidden_states: Tensor, experts: Experts, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """On any device and in any floating dtype. Deterministic."""
    x, experts = prepare("grouped_mm", hidden_states, experts, top_k_index, top_k_weights)
    return _experts(x, experts, top_k_index, top_k_weights).to(hidden_states.dtype)


grouped_mm, clamped, biased = variants(_run)


def _forward(x: Tensor, experts: Experts, index: Tensor, weights: Tensor) -> Outputs:
    if _has_grouped_mm(x, experts):
        return forward_grouped(_torch_product, x, experts, index, weights)
    return _forward_segments(x, experts, index, weights)


def fake(x: Tensor, experts: Experts, index: Tensor, weights: Tensor) -> Outputs:
    count, _, intermediate = experts.sizes
    return (
        torch.empty_like(x, memory_format=torch.contiguous_format),
        x.new_empty(index.numel(), 2 * intermediate),
        index.new_empty(index.numel(), dtype=torch.int64),
        index.new_empty(count, dtype=torch.int32),
    )


def _backward(
    grad: Tensor, x: Tensor, experts: Experts, weights: Tensor, saved: Sequence[Tensor], wanted: Wanted
) -> Grads:
    arguments = (grad.contiguous(), x, experts, weights, *saved, wanted)
    if _has_grouped_mm(x, experts):
        return backward_grouped(_torch_product, *arguments)
    return _backward_segments(*arguments)


def _has_grouped_mm(hidden_states: Tensor, experts: Experts) -> bool:
    """torch's grouped product runs bf16 with 16-byte rows on SM80 and newer, and slower code of its own elsewhere."""
    if hidden_states.device.type != "cuda" or hidden_states.dtype != torch.bfloat16:
        return False
    aligned = all(width % 8 == 0 for width in experts.sizes[1:])
    return aligned and torch.cuda.get_device_capability(hidden_states.device) >= (8, 0)


_grouped = getattr(F, "grouped_mm", None) or torch._grouped_mm


def _torch_product(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    return _grouped(left, right, offs=ends)


def _sort(top_k_index: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Slots (token * K + choice) in order of their experts, each slot's place in that order, and each expert's end.

    Slots of no expert held here, with an index outside 0..E-1, come last.
    """
    slots = top_k_index.reshape(-1)
    by_expert, order = torch.sort(slots.masked_fill(slots < 0, experts), stable=True)
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


def forward_grouped(product: Product, x: Tensor, experts: Experts, index: Tensor, weights: Tensor) -> Outputs:
    order, places, ends = _sort(index, experts.sizes[0])
    projected = product(x[order // index.shape[1]], _columns_last(experts.gate_up_proj, experts), ends)
    if experts.gate_up_bias is not None:
        projected += experts.gate_up_bias[_owners(order, ends)]
    rows = product(_gate(projected, experts), _columns_last(experts.down_proj, experts), ends)
    if experts.down_bias is not None:
        rows += experts.down_bias[_owners(order, ends)]
    return _gather_sum(rows, places, weights, ends, index.shape), projected, order, ends


def backward_grouped(
    product: Product,
    grad: Tensor,
    x: Tensor,
    experts: Experts,
    weights: Tensor,
    projected: Tensor,
    order: Tensor,
    ends: Tensor,
    wanted: Wanted,
) -> Grads:
    token = order // weights.shape[1]
    mine = torch.arange(order.numel(), device=order.device) < ends[-1]
    row_grad = grad[token]
    act_grad = product(row_grad, _columns_last(experts.down_proj, experts).transpose(1, 2), ends)
    scales = weights.reshape(-1)[order].unsqueeze(-1).to(x.dtype)
    projected_grad, weighted_act, dots = _gate_grad(projected, act_grad, scales, experts)
    if experts.down_bias is not None:
        dots += _row_dots(row_grad, experts.down_bias[_owners(order, ends)])
    weights_grad = weights.new_zeros(weights.numel())
    weights_grad[order] = torch.where(mine, dots, 0.0).to(weights.dtype)
    x_grad = gate_up_grad = down_grad = gate_up_bias_grad = down_bias_grad = None
    if wanted.inputs:
        rows = product(projected_grad, _columns_last(experts.gate_up_proj, experts).transpose(1, 2), ends)
        x_grad = _gather_sum(rows, _inverse(order), None, ends, weights.shape)
    if wanted.weights:
        gate_up_grad = product(*_weight_grad_operands(projected_grad, x[token], experts), ends)
        down_grad = product(*_weight_grad_operands(row_grad, weighted_act, experts), ends)
    if experts.biased and wanted.biases:
        # Sums over an expert's rows as products too: 8 equal rows, as wide as an operand has to be.
        ones, spread = torch.ones_like(scales).repeat(1, 8), scales.repeat(1, 8)
        gate_up_bias_grad = product(ones.t(), projected_grad, ends)[:, 0].contiguous()
        down_bias_grad = product(spread.t(), row_grad, ends)[:, 0].contiguous()
    grads = (x_grad, gate_up_grad, down_grad, weights_grad.view_as(weights), gate_up_bias_grad, down_bias_grad)
    return Grads(*grads)


def _columns_last(weight: Tensor, experts: Experts) -> Tensor:
    """The weight of a product as [E, inputs, outputs]."""
    return weight if experts.biased else weight.transpose(1, 2)


def _weight_grad_operands(outputs_grad: Tensor, inputs: Tensor, experts: Experts) -> tuple[Tensor, Tensor]:
    """What to multiply for the gradient of a weight, in the layout that the weight has."""
    return (inputs.t(), outputs_grad) if experts.biased else (outputs_grad.t(), inputs)


def _owners(order: Tensor, ends: Tensor) -> Tensor:
    """The expert of each sorted row; the last one for rows of no expert."""
    rows = torch.arange(order.numel(), device=order.device, dtype=ends.dtype)
    return torch.searchsorted(ends, rows, right=True).clamp_(max=ends.numel() - 1)


def _row_dots(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(-1, dtype=torch.promote_types(a.dtype, torch.float32))


def _halves(projected: Tensor, experts: Experts) -> tuple[Tensor, Tensor]:
    if experts.biased:
        return projected[:, ::2], projected[:, 1::2]
    gate, up = projected.chunk(2, dim=-1)
    return gate, up


def _bounded(gate: Tensor, up: Tensor, limit: float | None) -> tuple[Tensor, Tensor]:
    return (gate, up) if limit is None else (gate.clamp(max=limit), up.clamp(min=-limit, max=limit))


def _gate(projected: Tensor, experts: Experts) -> Tensor:
    gate, up = _bounded(*_halves(projected, experts), experts.limit)
    activated = F.silu(gate) if experts.alpha == 1.0 else torch.sigmoid(gate * experts.alpha).mul_(gate)
    return activated.mul_(up + experts.up_offset if experts.up_offset else up)


def _gate_grad(projected: Tensor, act_grad: Tensor, scales: Tensor, experts: Experts) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of gate and up [S, 2I], scale * act [S, I], row dots of act and `act_grad`; overwrites `act_grad`."""
    if experts.plain:
        return _swiglu_grad(projected, act_grad, scales, experts)
    wide = torch.promote_types(projected.dtype, torch.float32)
    given_gate, given_up = _halves(projected, experts)
    gate, up = _bounded(given_gate.to(wide), given_up.to(wide), experts.limit)
    sigmoid = torch.sigmoid(gate * experts.alpha)
    glu, lifted = gate * sigmoid, up + experts.up_offset
    act, grad = glu * lifted, act_grad.to(wide)
    dots = (act * grad).sum(-1)
    grad = grad * scales
    gate_grad = lifted.mul_(grad) * (glu * (1 - sigmoid)).mul_(experts.alpha).add_(sigmoid)
    up_grad = glu.mul_(grad)
    projected_grad = torch.empty_like(projected)
    gate_part, up_part = _halves(projected_grad, experts)
    if experts.limit is not None:
        gate_grad.masked_fill_(given_gate > experts.limit, 0)
        up_grad.masked_fill_(given_up.abs() > experts.limit, 0)
    gate_part.copy_(gate_grad)
    up_part.copy_(up_grad)
    return projected_grad, act.mul_(scales).to(projected.dtype), dots


def _swiglu_grad(
    projected: Tensor, act_grad: Tensor, scales: Tensor, experts: Experts
) -> tuple[Tensor, Tensor, Tensor]:
    gate, up = _halves(projected, experts)
    silu = F.silu(gate)
    act = silu * up
    dots = _row_dots(act, act_grad)
    act_grad.mul_(scales)
    projected_grad = torch.empty_like(projected)
    gate_grad, up_grad = _halves(projected_grad, experts)
    torch.mul(act_grad, silu, out=up_grad)
    torch.ops.aten.silu_backward(act_grad.mul_(up), gate, grad_input=gate_grad)
    return projected_grad, act.mul_(scales), dots


def _segments(ends: Tensor) -> list[tuple[int, slice]]:
    """(expert, its rows) of the experts that have any."""
    found, start = [], 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            found.append((expert, slice(start, end)))
        start = end
    return found


def _forward_segments(x: Tensor, experts: Experts, index: Tensor, weights: Tensor) -> Outputs:
    count, _, intermediate = experts.sizes
    order, places, ends = _sort(index, count)
    token = order // index.shape[1]
    projected = x.new_empty(order.numel(), 2 * intermediate)
    rows = x.new_empty(order.numel(), x.shape[1])
    gate_up, down = (_columns_last(w, experts) for w in (experts.gate_up_proj, experts.down_proj))
    for expert, part in _segments(ends):
        _linear(x[token[part]], gate_up[expert], experts.gate_up_bias, expert, projected[part])
        _linear(_gate(projected[part], experts), down[expert], experts.down_bias, expert, rows[part])
    return _gather_sum(rows, places, weights, ends, index.shape), projected, order, ends


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, expert: int, out: Tensor) -> None:
    if bias is None:
        torch.mm(x, weight, out=out)
    else:
        torch.addmm(bias[expert], x, weight, out=out)


def _backward_segments(
    grad: Tensor,
    x: Tensor,
    experts: Experts,
    weights: Tensor,
    projected: Tensor,
    order: Tensor,
    ends: Tensor,
    wanted: Wanted,
) -> Grads:
    token = order // weights.shape[1]
    scales = weights.reshape(-1)[order].unsqueeze(-1).to(x.dtype)
    weights_grad = weights.new_zeros(weights.numel())
    segments = _segments(ends)
    whole = len(segments) == experts.sizes[0]
    fresh = torch.empty_like if whole else torch.zeros_like
    gate_up_grad, down_grad = (
        fresh(w, memory_format=torch.contiguous_format) if wanted.weights else None
        for w in (experts.gate_up_proj, experts.down_proj)
    )
    gate_up_bias_grad, down_bias_grad = (
        fresh(b) if b is not None and wanted.biases else None for b in (experts.gate_up_bias, experts.down_bias)
    )
    gate_up, down = (_columns_last(w, experts) for w in (experts.gate_up_proj, experts.down_proj))
    rows = x.new_empty(order.numel() if wanted.inputs else 0, x.shape[1])
    for expert, part in segments:
        row_grad = grad[token[part]]
        act_grad = torch.mm(row_grad, down[expert].t())
        projected_grad, weighted_act, dots = _gate_grad(projected[part], act_grad, scales[part], experts)
        if experts.down_bias is not None:
            dots += _row_dots(row_grad, experts.down_bias[expert])
        weights_grad[order[part]] = dots.to(weights.dtype)
        if gate_up_grad is not None and down_grad is not None:
            torch.mm(*_weight_grad_operands(row_grad, weighted_act, experts), out=down_grad[expert])
            torch.mm(*_weight_grad_operands(projected_grad, x[token[part]], experts), out=gate_up_grad[expert])
        if gate_up_bias_grad is not None and down_bias_grad is not None:
            torch.sum(projected_grad, 0, out=gate_up_bias_grad[expert])
            torch.mm(scales[part].t(), row_grad, out=down_bias_grad[expert : expert + 1])
        if wanted.inputs:
            torch.mm(projected_grad, gate_up[expert].t(), out=rows[part])
    x_grad = None
    if wanted.inputs:
        x_grad = _gather_sum(rows, _inverse(order), None, ends, weights.shape)
    grads = (x_grad, gate_up_grad, down_grad, weights_grad.view_as(weights), gate_up_bias_grad, down_bias_grad)
    return Grads(*grads)


_experts = differentiable("moe_grouped_mm", _forward, _backward, fake)
