"""The activation between the two GEMMs of experts, and its gradient, for the rows of all experts."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from opslot.ops._common.activations import ACTIVATIONS, SLOPES, limit_has_gradient
from opslot.ops.moe_experts.contract import Experts

# (gate and up [P, 2I],), (up [P, I],) or (gate [P, I], up [P, I])
Parts = tuple[Tensor, ...]


def empty_parts(like: Tensor, experts: Experts, rows: int, width: int) -> Parts:
    if experts.up_proj is None:
        return (like.new_empty(rows, experts.halves * width),)
    return (like.new_empty(rows, width), like.new_empty(rows, width))


def row_dots(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(-1, dtype=torch.promote_types(a.dtype, torch.float32))


def halves_of(parts: Parts, experts: Experts) -> tuple[Tensor, Tensor]:
    """Gate and up; without a gate, twice the same."""
    if not experts.gated:
        return parts[0], parts[0]
    if experts.biased:
        return parts[0][:, ::2], parts[0][:, 1::2]
    gate, up = parts if len(parts) == 2 else parts[0].chunk(2, dim=-1)
    return gate, up


def bounded(gate: Tensor, up: Tensor, experts: Experts) -> tuple[Tensor, Tensor]:
    """Gate and up within the limit, if there is one."""
    limit = experts.limit
    if limit is None:
        return gate, up
    return gate if experts.clamps_activation else gate.clamp(max=limit), up.clamp(min=-limit, max=limit)


def activate_parts(gate: Tensor, up: Tensor, experts: Experts) -> Tensor:
    gate, up = bounded(gate, up, experts)
    if experts.alpha != 1.0:
        activated = torch.sigmoid(gate * experts.alpha).mul_(gate)
    else:
        activated = ACTIVATIONS[experts.activation](gate)
    if not experts.gated:
        return activated
    if experts.clamps_activation and experts.limit is not None:
        activated = activated.clamp_(max=experts.limit)
    return activated.mul_(up + experts.up_offset if experts.up_offset else up)


def activate_backward(
    given_gate: Tensor, given_up: Tensor, act_grad: Tensor, scales: Tensor, experts: Experts
) -> tuple[Parts, Tensor, Tensor]:
    """Gradient of gate and up, scale * act [P, I], row dots of act and `act_grad`; overwrites `act_grad`."""
    if experts.plain:
        return _swiglu_grad(given_gate, given_up, act_grad, scales, experts)
    dtype = torch.promote_types(act_grad.dtype, torch.float32)
    gate, up = bounded(given_gate.to(dtype), given_up.to(dtype), experts)
    glu, slope = _activation_and_slope(gate, experts)
    grad = act_grad.to(dtype)
    if not experts.gated:
        dots = (glu * grad).sum(-1)
        return ((grad * scales).mul_(slope).to(act_grad.dtype),), glu.mul_(scales).to(act_grad.dtype), dots
    limited = given_gate
    if experts.clamps_activation:
        limited, glu = glu, glu.clamp(max=experts.limit)
    lifted = up + experts.up_offset
    act = glu * lifted
    dots = (act * grad).sum(-1)
    grad = grad * scales
    gate_grad = lifted.mul_(grad) * slope
    up_grad = glu.mul_(grad)
    parts_grad = empty_parts(act_grad, experts, *act_grad.shape)
    gate_part, up_part = halves_of(parts_grad, experts)
    if experts.limit is not None:
        beyond = torch.gt if limit_has_gradient() else torch.ge
        gate_grad.masked_fill_(beyond(limited, experts.limit), 0)
        up_grad.masked_fill_(beyond(given_up.abs(), experts.limit), 0)
    gate_part.copy_(gate_grad)
    up_part.copy_(up_grad)
    return parts_grad, act.mul_(scales).to(act_grad.dtype), dots


def _activation_and_slope(gate: Tensor, experts: Experts) -> tuple[Tensor, Tensor]:
    if experts.activation != "silu":
        return ACTIVATIONS[experts.activation](gate), SLOPES[experts.activation](gate)
    sigmoid = torch.sigmoid(gate * experts.alpha)
    activated = gate * sigmoid
    return activated, (activated * (1 - sigmoid)).mul_(experts.alpha).add_(sigmoid)


def _swiglu_grad(
    gate: Tensor, up: Tensor, act_grad: Tensor, scales: Tensor, experts: Experts
) -> tuple[Parts, Tensor, Tensor]:
    silu = F.silu(gate)
    act = silu * up
    dots = row_dots(act, act_grad)
    act_grad.mul_(scales)
    parts_grad = empty_parts(act_grad, experts, *act_grad.shape)
    gate_grad, up_grad = halves_of(parts_grad, experts)
    torch.mul(act_grad, silu, out=up_grad)
    torch.ops.aten.silu_backward(act_grad.mul_(up), gate, grad_input=gate_grad)
    return parts_grad, act.mul_(scales), dots
