"""fused_triton: routed experts as grouped Triton products with SwiGLU and the routing weights in their epilogues.

Forward: sort slots by expert (`routing.py`); one product makes gate, up and silu(gate) * up; one makes each row's output; a
weighted sum over a token's rows follows, without atomics. Saved for backward: gate and up [2, R, I] and the routing.
Backward: the down product's input gradient with SwiGLU's backward in its epilogue, which also gives the routing weights'
gradient as row dots; then the input gradient and both weight gradients, the latter over each expert's rows.
The idea of keeping only gate and up, and of gathering where rows are used, is SonicMoE's (arXiv 2512.14080).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from opslot.ops.moe_experts import triton_kernels as kernels
from opslot.ops.moe_experts._autograd import Grads, differentiable
from opslot.ops.moe_experts._call import prepare
from opslot.ops.moe_experts.routing import Routing, empty_routing, route

DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32})


@dataclass(frozen=True)
class Tiles:
    """How one product is cut: BM x BN outputs, BK deep; `group` row tiles walked together; `per_sm` persistent programs."""

    bm: int
    bn: int
    bk: int
    warps: int
    stages: int
    group: int = 8
    per_sm: int = 1
    flatten: bool = False
    gather: bool = True


@dataclass(frozen=True)
class Plan:
    """The cuts of all six products. Rows of an expert start at multiples of `align`, which every row product's bm divides."""

    align: int
    gate_up: Tiles
    down: Tiles
    act_grad: Tiles
    input_grad: Tiles
    gate_up_grad: Tiles
    down_grad: Tiles
    tma: bool = False
    programs: int = 1


def _uniform(align: int, tiles: Tiles, tma: bool, programs: int) -> Plan:
    return Plan(align, tiles, tiles, tiles, tiles, tiles, tiles, tma, programs)


def plan_for(hidden_states: Tensor, down_proj: Tensor, top_k_index: Tensor) -> Plan:
    """The plan for these shapes on this device."""
    if not hidden_states.is_cuda:
        return _uniform(64, Tiles(64, 64, 64, 4, 1), tma=False, programs=3)
    properties = torch.cuda.get_device_properties(hidden_states.device)
    programs = properties.multi_processor_count
    if hidden_states.element_size() > 2:
        return _uniform(64, Tiles(64, 64, 32, 4, 2, per_sm=2), tma=False, programs=programs)
    aligned = all(width % 8 == 0 for width in down_proj.shape[1:])
    if properties.major < 9 or not aligned:
        return _uniform(128, Tiles(128, 128, 32, 8, 3), tma=False, programs=programs)
    return Plan(
        align=128,
        gate_up=Tiles(128, 128, 64, 8, 3),
        down=Tiles(128, 256, 64, 8, 3),
        act_grad=Tiles(128, 128, 64, 8, 3),
        input_grad=Tiles(128, 256, 64, 8, 3),
        gate_up_grad=Tiles(128, 256, 64, 8, 3),
        down_grad=Tiles(128, 256, 64, 8, 3),
        tma=True,
        programs=programs,
    )


def fused_triton(
    hidden_states: Tensor, gate_up_proj: Tensor, down_proj: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The contract of `op.standard` for bf16, fp16 and fp32 on GPUs from SM80. Deterministic.

    Raises:
        KernelError: shapes or dtypes that are not the contract's, or weights that are not contiguous.
    """
    x, gate_up, down = prepare(
        "fused_triton", hidden_states, gate_up_proj, down_proj, top_k_index, top_k_weights, DTYPES, contiguous=True
    )
    output = _experts(x, gate_up, down, top_k_index, top_k_weights)
    return output.to(hidden_states.dtype)


def _operand(plan: Plan, tensor: Tensor, block_rows: int, block_columns: int) -> Tensor | TensorDescriptor:
    """`tensor` [planes, rows, columns] as the kernels take it."""
    if not plan.tma:
        return tensor
    return TensorDescriptor.from_tensor(tensor, [1, block_rows, block_columns])


def _grid(plan: Plan, tiles: Tiles, count: int) -> tuple[int]:
    return (min(count, plan.programs * tiles.per_sm),)


def _cut(tiles: Tiles) -> dict[str, int | bool]:
    return {
        "BM": tiles.bm,
        "BN": tiles.bn,
        "BK": tiles.bk,
        "GROUP": tiles.group,
        "FLATTEN": tiles.flatten,
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
    }


def gather(x: Tensor, top_k: int, routing: Routing) -> Tensor:
    """Each row's token [1, R, H]; zero in rows without one."""
    rows, hidden = routing.slots.numel(), x.shape[1]
    out = x.new_empty(1, rows, hidden)
    block = min(triton.next_power_of_2(hidden), 256)
    experts = routing.counts.numel()
    kernels.gather_kernel[(triton.cdiv(rows, 32), triton.cdiv(hidden, block))](
        x, routing.slots, out, routing.starts, experts, hidden, TOP_K=top_k, BM=32, BC=block, num_warps=4
    )
    return out


def combine(rows: Tensor, places: Tensor, top_k_weights: Tensor, weighted: bool) -> Tensor:
    """Each token's sum [T, H] over its rows of `rows` [..., R, H], times their weights if `weighted`."""
    tokens, top_k = top_k_weights.shape
    hidden = rows.shape[-1]
    out = rows.new_empty(tokens, hidden)
    block = min(triton.next_power_of_2(hidden), 1024)
    kernels.combine_kernel[(tokens, triton.cdiv(hidden, block))](
        rows, places, top_k_weights, out, hidden, TOP_K=top_k, WEIGHTED=weighted, BC=block, num_warps=4
    )
    return out


def rows_product(
    plan: Plan, tiles: Tiles, a: Tensor, weight: Tensor, columns: int, weight_nk: bool, routing: Routing
) -> Tensor:
    planes, rows, inner = a.shape
    out = a.new_empty(1, rows, columns)
    blocks = (tiles.bn, tiles.bk) if weight_nk else (tiles.bk, tiles.bn)
    kernels.rows_kernel[_grid(plan, tiles, rows // tiles.bm * triton.cdiv(columns, tiles.bn))](
        _operand(plan, a, tiles.bm, tiles.bk),
        _operand(plan, weight, *blocks),
        _operand(plan, out, tiles.bm, tiles.bn),
        routing.starts,
        routing.tile_expert,
        routing.counts.numel(),
        rows,
        columns,
        inner,
        PLANES=planes,
        WEIGHT_NK=weight_nk,
        TMA=plan.tma,
        ALIGN=plan.align,
        **_cut(tiles),
    )
    return out


def weight_grad_product(
    plan: Plan, tiles: Tiles, left: Tensor, right: Tensor, planes: int, top_k: int, routing: Routing
) -> Tensor:
    """[E * planes, M, N]; `left` [planes, R, M] and `right` [1, R, N], of which one may be [T, .] to be gathered."""
    groups = routing.counts.numel() * planes
    m, n = left.shape[-1], right.shape[-1]
    out = left.new_empty(groups, m, n)
    gather_left, gather_right = left.dim() == 2, right.dim() == 2
    kernels.weight_grad_kernel[_grid(plan, tiles, groups * triton.cdiv(m, tiles.bm) * triton.cdiv(n, tiles.bn))](
        left if gather_left else _operand(plan, left, tiles.bk, tiles.bm),
        right if gather_right else _operand(plan, right, tiles.bk, tiles.bn),
        routing.slots,
        _operand(plan, out, tiles.bm, tiles.bn),
        routing.starts,
        routing.counts,
        groups,
        routing.slots.numel(),
        m,
        n,
        PLANES=planes,
        TOP_K=top_k,
        GATHER_LEFT=gather_left,
        GATHER_RIGHT=gather_right,
        TMA=plan.tma,
        **_cut(tiles),
    )
    return out


def forward(
    plan: Plan,
    hidden_states: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> tuple[Tensor, ...]:
    """The output [T, H], gate and up [2, R, I] and the tensors of `Routing`."""
    experts, hidden, intermediate = down_proj.shape
    x = hidden_states.contiguous()
    routing = route(top_k_index.contiguous(), experts, plan.align)
    if routing.slots.numel() == 0:
        return torch.zeros_like(x), x.new_empty(2, 0, intermediate), *routing
    projected, act = gate_up(plan, x, gate_up_proj, top_k_index.shape[1], routing)
    outputs = rows_product(plan, plan.down, act, down_proj, hidden, True, routing)
    return combine(outputs, routing.places, top_k_weights.contiguous(), True), projected, *routing


def backward(
    plan: Plan,
    grad: Tensor,
    hidden_states: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    top_k_weights: Tensor,
    projected: Tensor,
    routing: Routing,
    input_grad: bool,
    weight_grad: bool,
) -> Grads:
    """Gradients of hidden_states, gate_up_proj, down_proj and top_k_weights; empty [0] where not wanted."""
    experts, hidden, intermediate = down_proj.shape
    top_k = top_k_weights.shape[1]
    none = grad.new_empty(0)
    if routing.slots.numel() == 0:
        wanted = (torch.zeros_like(gate_up_proj), torch.zeros_like(down_proj)) if weight_grad else (none, none)
        return torch.zeros_like(hidden_states), *wanted, torch.zeros_like(top_k_weights)
    x, grad, top_k_weights = hidden_states.contiguous(), grad.contiguous(), top_k_weights.contiguous()
    row_grad = None if plan.act_grad.gather and plan.down_grad.gather else gather(grad, top_k, routing)
    source = grad if plan.act_grad.gather else row_grad
    projected_grad, weighted_act, weights_grad = act_grad(plan, source, down_proj, projected, top_k_weights, routing)
    x_grad = gate_up_grad = down_grad = none
    if weight_grad:
        source = grad if plan.down_grad.gather else row_grad
        down_grad = weight_grad_product(plan, plan.down_grad, source, weighted_act, 1, top_k, routing)
        del row_grad, weighted_act
        source = x if plan.gate_up_grad.gather else gather(x, top_k, routing)
        gate_up_grad = weight_grad_product(plan, plan.gate_up_grad, projected_grad, source, 2, top_k, routing)
        gate_up_grad = gate_up_grad.view_as(gate_up_proj)
    if input_grad:
        del source
        weight = gate_up_proj.view(2 * experts, intermediate, hidden)
        terms = rows_product(plan, plan.input_grad, projected_grad, weight, hidden, False, routing)
        x_grad = combine(terms, routing.places, top_k_weights, False)
    return x_grad, gate_up_grad, down_grad, weights_grad


def gate_up(
    plan: Plan, x: Tensor, gate_up_proj: Tensor, top_k: int, routing: Routing, row_tokens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Gate and up [2, R, I] and silu(gate) * up [1, R, I]."""
    experts, double, hidden = gate_up_proj.shape
    intermediate, rows, tiles = double // 2, routing.slots.numel(), plan.gate_up
    projected = x.new_empty(2, rows, intermediate)
    act = x.new_empty(1, rows, intermediate)
    source = x
    if not tiles.gather:
        source = _operand(plan, gather(x, top_k, routing) if row_tokens is None else row_tokens, tiles.bm, tiles.bk)
    kernels.gate_up_kernel[_grid(plan, tiles, rows // tiles.bm * triton.cdiv(intermediate, tiles.bn))](
        source,
        routing.slots,
        _operand(plan, gate_up_proj.view(2 * experts, intermediate, hidden), tiles.bn, tiles.bk),
        _operand(plan, projected, tiles.bm, tiles.bn),
        _operand(plan, act, tiles.bm, tiles.bn),
        routing.starts,
        routing.tile_expert,
        experts,
        rows,
        hidden,
        intermediate,
        TOP_K=top_k,
        GATHER=tiles.gather,
        TMA=plan.tma,
        ALIGN=plan.align,
        **_cut(tiles),
    )
    return projected, act


def act_grad(
    plan: Plan, source: Tensor, down_proj: Tensor, projected: Tensor, top_k_weights: Tensor, routing: Routing
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of gate and up [2, R, I]; weight * act [1, R, I]; and the gradient of `top_k_weights`."""
    experts, hidden, intermediate = down_proj.shape
    rows = routing.slots.numel()
    tiles = plan.act_grad
    columns = triton.cdiv(intermediate, tiles.bn)
    projected_grad = torch.empty_like(projected)
    weighted_act = projected.new_empty(1, rows, intermediate)
    slot_grad = projected.new_empty((columns, rows), dtype=torch.float32)
    kernels.act_grad_kernel[_grid(plan, tiles, rows // tiles.bm * columns)](
        source if tiles.gather else _operand(plan, source, tiles.bm, tiles.bk),
        routing.slots,
        top_k_weights,
        _operand(plan, down_proj, tiles.bk, tiles.bn),
        _operand(plan, projected, tiles.bm, tiles.bn // 2),
        _operand(plan, projected_grad, tiles.bm, tiles.bn // 2),
        _operand(plan, weighted_act, tiles.bm, tiles.bn // 2),
        slot_grad,
        routing.starts,
        routing.tile_expert,
        experts,
        rows,
        hidden,
        intermediate,
        TOP_K=top_k_weights.shape[1],
        GATHER=tiles.gather,
        TMA=plan.tma,
        ALIGN=plan.align,
        **_cut(tiles),
    )
    weights_grad = torch.empty_like(top_k_weights)
    slots = weights_grad.numel()
    kernels.slot_sum_kernel[(triton.cdiv(slots, 256),)](
        slot_grad, routing.places, weights_grad, slots, rows, columns, BLOCK=256, num_warps=4
    )
    return projected_grad, weighted_act, weights_grad


def _forward(x: Tensor, gate_up_proj: Tensor, down_proj: Tensor, index: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
    return forward(plan_for(x, down_proj, index), x, gate_up_proj, down_proj, index, weights)


def _fake(x: Tensor, gate_up_proj: Tensor, down_proj: Tensor, index: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
    experts, _, intermediate = down_proj.shape
    routing = empty_routing(index, experts, plan_for(x, down_proj, index).align)
    projected = x.new_empty(2, routing.slots.numel(), intermediate)
    return torch.empty_like(x, memory_format=torch.contiguous_format), projected, *routing


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
    projected, *routing = saved
    plan = plan_for(x, down_proj, weights)
    arguments = (grad, x, gate_up_proj, down_proj, weights, projected, Routing(*routing))
    return backward(plan, *arguments, input_grad, weight_grad)


_experts = differentiable("moe_fused_triton", _forward, _backward, _fake)
