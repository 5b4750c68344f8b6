"""fused_triton: routed experts as grouped Triton GEMMs with SwiGLU in the first one's epilogue.

Forward: sort token-expert pairs by expert (`routing.py`); the gate_up GEMM computes gate, up and silu(gate) * up; the
down GEMM computes each row's output; combine computes the weighted sum of each token's rows, without atomics. Saved for
backward: gate and up [2, R, I] and the routing, as in SonicMoE (arXiv 2512.14080). Backward: the down GEMM's input
gradient; SwiGLU's backward, which recomputes act and also computes the routing weights' gradient as row dots; then the
input gradient and both weight gradients, per expert. If gate and up are separate weights, the first GEMM accumulates
both in one tile loop, and the input gradient's GEMM reads first one, then the other.

Measured on an H200, and slower: SwiGLU's backward in the GEMM's epilogue (it runs out of registers), and gathering
tokens inside the weight gradients (their loads are no longer pipelined). Gathering and combining on a second stream
takes as long as on one (the GPU is at its power limit in these GEMMs, benchmarks/results/gemm_h200.json).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from opslot._base.device import triton_interpreted
from opslot._base.errors import KernelError
from opslot.ops._common.contract import variants_of
from opslot.ops._common.specs import FLOATS
from opslot.ops.moe_experts import triton_kernels as kernels
from opslot.ops.moe_experts._autograd import Grads, Wanted, differentiable
from opslot.ops.moe_experts._call import prepare
from opslot.ops.moe_experts.contract import VARIANTS, Experts, ExpertsInputs
from opslot.ops.moe_experts.low_rank import add_adapters
from opslot.ops.moe_experts.routing import Routing, empty_routing, route, row_bound
from opslot.ops.moe_experts.tiling import GemmTiling, Tiles, plan_for


def _run(given: ExpertsInputs) -> Tensor:
    """In bf16, fp16 and fp32 on GPUs from SM80. Deterministic.

    Raises:
        KernelError: unsupported shapes or dtypes, or weights that are not contiguous.
    """
    _require_device(given.hidden_states)
    x, experts = prepare("fused_triton", given, FLOATS, contiguous=True)
    return _experts(x, experts, given.top_k_index, given.top_k_weights).to(given.hidden_states.dtype)


def _require_device(x: Tensor) -> None:
    if x.device.type == "cpu" and not triton_interpreted():
        found = "tensors on the CPU"
        todo = "move them to a GPU, set TRITON_INTERPRET=1, or use moe_implementation=grouped_mm"
        raise KernelError("moe_implementation='fused_triton' cannot run this call", found=found, hint=todo)


class _AlignedRows:
    """`ExpertRows` for the grouped GEMMs of this file: each expert's first row is a multiple of `align`."""

    def __init__(self, x: Tensor, index: Tensor, experts: Experts) -> None:
        _require_device(x)
        self._plan = plan_for(experts)
        self._routing = route(index.contiguous(), experts.sizes[0], self._plan.align)
        row_to_pair = self._routing.row_to_pair.long()
        self.is_pair = row_to_pair >= 0
        self.pair = row_to_pair.clamp(min=0)
        self.expert = self._routing.tile_expert.long().repeat_interleave(self._plan.align)

    def gemm(self, rows: Tensor, weight: Tensor) -> Tensor:
        if not len(rows):
            return rows.new_zeros(0, weight.shape[2])
        nk = not weight.is_contiguous()
        stored = weight.mT.contiguous() if nk else weight
        columns, planes = weight.shape[2], rows.contiguous()[None]
        return rows_gemm(self._plan, self._tiles(columns), planes, stored, columns, nk, self._routing).squeeze(0)

    def weight_grad(self, left: Tensor, right: Tensor) -> Tensor:
        m, n = left.shape[1], right.shape[1]
        if not len(left):
            return left.new_zeros(self._routing.expert_counts.numel(), m, n)
        operands = left.contiguous()[None], right.contiguous()[None]
        return weight_grad_gemm(self._plan, self._tiles(n), *operands, self._routing)

    def combine(self, rows: Tensor, weights: Tensor, weighted: bool) -> Tensor:
        if not len(rows):
            return rows.new_zeros(len(weights), rows.shape[1])
        return combine(rows[None], self._routing.pair_to_row, weights.contiguous(), weighted)

    def _tiles(self, columns: int) -> Tiles:
        """Narrow tiles for the few columns of a low-rank factor."""
        tiles = self._plan.down
        return replace(tiles, bn=min(tiles.bn, max(32, triton.next_power_of_2(columns))))


KERNELS = standard, clamped, biased, split, transposed, ungated = variants_of(_run, VARIANTS)
add_adapters(
    "fused_triton",
    KERNELS,
    functools.partial(prepare, "fused_triton", dtypes=FLOATS, contiguous=True),
    _AlignedRows,
    lambda index, experts: row_bound(index.numel(), experts.sizes[0], plan_for(experts, real=False).align),
)


def _operand(
    plan: GemmTiling, tensor: Tensor, block_rows: int, block_columns: int, planes: int = 1
) -> Tensor | TensorDescriptor:
    """`tensor` [planes, rows, columns] as the kernel argument: a pointer or a tensor descriptor."""
    if not plan.tma:
        return tensor
    return TensorDescriptor.from_tensor(tensor, [planes, block_rows, block_columns])


def _grid(plan: GemmTiling, tiles: Tiles, count: int) -> tuple[int]:
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
    """The token of each row [1, R, H]; zero for padding."""
    rows, hidden = routing.row_to_pair.numel(), x.shape[1]
    out = x.new_empty(1, rows, hidden)
    block = min(triton.next_power_of_2(hidden), 128)
    experts = routing.expert_counts.numel()
    kernels.gather_kernel[(triton.cdiv(rows, 64), triton.cdiv(hidden, block))](
        x, routing.row_to_pair, out, routing.expert_offsets, experts, hidden, TOP_K=top_k, BM=64, BC=block, num_warps=4
    )
    return out


def combine(rows: Tensor, pair_to_row: Tensor, top_k_weights: Tensor, weighted: bool) -> Tensor:
    """The sum [T, H] of each token's rows of `rows` [..., R, H], times their routing weights if `weighted`."""
    tokens, top_k = top_k_weights.shape
    hidden = rows.shape[-1]
    out = rows.new_empty(tokens, hidden)
    block = min(triton.next_power_of_2(hidden), 512)
    kernels.combine_kernel[(tokens, triton.cdiv(hidden, block))](
        rows, pair_to_row, top_k_weights, out, hidden, TOP_K=top_k, WEIGHTED=weighted, BC=block, num_warps=4
    )
    return out


def pair_sum(parts: Tensor, pair_to_row: Tensor, like: Tensor) -> Tensor:
    """The sum over dim 0 of `parts` [parts, R] at each pair's row, like `like` [T, K]; zero for pairs without a row."""
    out = torch.empty_like(like)
    count, rows = parts.shape
    kernels.pair_sum_kernel[(triton.cdiv(out.numel(), 256),)](
        parts, pair_to_row, out, out.numel(), rows, count, BLOCK=256, num_warps=4
    )
    return out


def rows_gemm(
    plan: GemmTiling,
    tiles: Tiles,
    a: Tensor,
    weight: Tensor,
    columns: int,
    weight_nk: bool,
    routing: Routing,
    bias: Tensor | None = None,
    other: Tensor | None = None,
) -> Tensor:
    """[1, R, columns]: rows of `a` [PLANES, R, K] times their experts' `weight`, plus `bias` [E, columns].

    `other`: the weight of the second plane, if `weight` is only that of the first.
    """
    planes, rows, inner = a.shape
    out = a.new_empty(1, rows, columns)
    blocks = (tiles.bn, tiles.bk) if weight_nk else (tiles.bk, tiles.bn)
    kernels.rows_kernel[_grid(plan, tiles, rows // tiles.bm * triton.cdiv(columns, tiles.bn))](
        _operand(plan, a, tiles.bm, tiles.bk),
        _operand(plan, weight, *blocks),
        None if other is None else _operand(plan, other, *blocks),
        bias,
        _operand(plan, out, tiles.bm, tiles.bn),
        routing.expert_offsets,
        routing.tile_expert,
        routing.expert_counts.numel(),
        rows,
        columns,
        inner,
        BIASED=bias is not None,
        SPLIT=other is not None,
        PLANES=planes,
        WEIGHT_NK=weight_nk,
        TMA=plan.tma,
        ALIGN=plan.align,
        **_cut(tiles),
    )
    return out


def weight_grad_gemm(plan: GemmTiling, tiles: Tiles, left: Tensor, right: Tensor, routing: Routing) -> Tensor:
    """[E * PLANES, M, N]: left^T right over each expert's rows of `left` [PLANES, R, M] and `right` [1, R, N]."""
    planes, rows, m = left.shape
    n, groups = right.shape[2], routing.expert_counts.numel() * planes
    out = left.new_empty(groups, m, n)
    kernels.weight_grad_kernel[_grid(plan, tiles, groups * triton.cdiv(m, tiles.bm) * triton.cdiv(n, tiles.bn))](
        _operand(plan, left, tiles.bk, tiles.bm),
        _operand(plan, right, tiles.bk, tiles.bn),
        _operand(plan, out, tiles.bm, tiles.bn),
        routing.expert_offsets,
        routing.expert_counts,
        groups,
        rows,
        m,
        n,
        PLANES=planes,
        TMA=plan.tma,
        **_cut(tiles),
    )
    return out


def forward(
    plan: GemmTiling, x: Tensor, experts: Experts, top_k_index: Tensor, top_k_weights: Tensor
) -> tuple[Tensor, ...]:
    """The output [T, H], what `gate_up` projects, and the tensors of `Routing`."""
    count, hidden, intermediate = experts.sizes
    x = x.contiguous()
    routing = route(top_k_index.contiguous(), count, plan.align)
    if routing.row_to_pair.numel() == 0:
        return torch.zeros_like(x), x.new_empty(1 + experts.gated, 0, intermediate), *routing
    projected, act = gate_up(plan, x, experts, top_k_index.shape[1], routing)
    down, bias = experts.down_proj, experts.down_bias
    outputs = rows_gemm(plan, plan.down, act, down, hidden, not experts.down_transposed, routing, bias)
    return combine(outputs, routing.pair_to_row, top_k_weights.contiguous(), True), projected, *routing


def backward(
    plan: GemmTiling,
    grad: Tensor,
    x: Tensor,
    experts: Experts,
    top_k_weights: Tensor,
    projected: Tensor,
    routing: Routing,
    wanted: Wanted,
) -> Grads:
    """The gradients in `wanted`."""
    count, hidden, intermediate = experts.sizes
    top_k = top_k_weights.shape[1]
    if routing.row_to_pair.numel() == 0:
        x_zeros, gate_up_zeros, down_zeros = (torch.zeros_like(t) for t in (x, *experts[:2]))
        others = (None if t is None else torch.zeros_like(t) for t in experts[2:5])
        return Grads(x_zeros, gate_up_zeros, down_zeros, torch.zeros_like(top_k_weights), *others)
    x, grad, top_k_weights = x.contiguous(), grad.contiguous(), top_k_weights.contiguous()
    row_grad = gather(grad, top_k, routing)
    down = experts.down_proj
    act_grad = rows_gemm(plan, plan.act_grad, row_grad, down, intermediate, experts.down_transposed, routing)
    projected_grad, weighted_act, weights_grad = gate_grad(
        plan, act_grad, projected, row_grad, experts, top_k_weights, routing
    )
    x_grad = gate_up_grad = down_grad = up_grad = gate_up_bias_grad = down_bias_grad = None
    if experts.biased and wanted.biases:
        gate_up_bias_grad = bias_grad(projected_grad, routing)
        down_bias_grad = bias_grad(row_grad, routing, top_k_weights)
    if wanted.weights:
        operands = (weighted_act, row_grad) if experts.down_transposed else (row_grad, weighted_act)
        down_grad = weight_grad_gemm(plan, plan.down_grad, *operands, routing)
    del row_grad, act_grad, weighted_act
    if wanted.weights:
        rows = gather(x, top_k, routing)
        gate_up_grad, up_grad = gate_up_grads(plan, projected_grad, rows, experts, routing)
        del rows
    if wanted.inputs:
        weight, other = experts.gate_up_proj, experts.up_proj
        if not experts.transposed and experts.halves == 2:
            weight = weight.view(2 * count, intermediate, hidden)
        tiles, nk = plan.input_grad, experts.transposed
        terms = rows_gemm(plan, tiles, projected_grad, weight, hidden, nk, routing, other=other)
        x_grad = combine(terms, routing.pair_to_row, top_k_weights, False)
    return Grads(x_grad, gate_up_grad, down_grad, weights_grad, up_grad, gate_up_bias_grad, down_bias_grad)


def gate_up_grads(
    plan: GemmTiling, projected_grad: Tensor, rows: Tensor, experts: Experts, routing: Routing
) -> tuple[Tensor, Tensor | None]:
    """The gradients of `gate_up_proj` and `up_proj`, as separate tensors if both exist."""
    if experts.up_proj is not None:
        gate, up = (weight_grad_gemm(plan, plan.gate_up_grad, part, rows, routing) for part in projected_grad.split(1))
        return gate, up
    operands = (rows, projected_grad) if experts.transposed else (projected_grad, rows)
    return weight_grad_gemm(plan, plan.gate_up_grad, *operands, routing).view_as(experts.gate_up_proj), None


def _gating(experts: Experts) -> dict[str, str | float | bool | None]:
    return {
        "ACTIVATION": experts.activation,
        "LIMIT": experts.limit,
        "ALPHA": experts.alpha,
        "UP_OFFSET": experts.up_offset,
        "CLAMPS_ACTIVATION": experts.clamps_activation,
        "GATED": experts.gated,
        "TRANSPOSED": experts.transposed,
        "BIASED": experts.biased,
    }


def gate_up(plan: GemmTiling, x: Tensor, experts: Experts, top_k: int, routing: Routing) -> tuple[Tensor, Tensor]:
    """Gate and up [2, R, I] or, without a gate, [1, R, I], and their activation [1, R, I]."""
    count, hidden, intermediate = experts.sizes
    rows, tiles = routing.row_to_pair.numel(), plan.gate_up
    projected = x.new_empty(1 + experts.gated, rows, intermediate)
    act = x.new_empty(1, rows, intermediate)
    up_weight = None
    if experts.up_proj is not None:
        weight, up_weight = (_operand(plan, w, tiles.bn, tiles.bk) for w in experts.gate_up_weights)
    elif experts.transposed:
        weight = _operand(plan, experts.gate_up_proj, tiles.bk, (1 + experts.biased) * tiles.bn)
    elif not experts.gated:
        weight = _operand(plan, experts.gate_up_proj, tiles.bn, tiles.bk)
    else:
        halves = experts.gate_up_proj.view(2 * count, intermediate, hidden)
        weight = _operand(plan, halves, tiles.bn, tiles.bk, planes=2)
    kernels.gate_up_kernel[_grid(plan, tiles, rows // tiles.bm * triton.cdiv(intermediate, tiles.bn))](
        x,
        routing.row_to_pair,
        weight,
        up_weight,
        experts.gate_up_bias,
        _operand(plan, projected, tiles.bm, tiles.bn),
        _operand(plan, act, tiles.bm, tiles.bn),
        routing.expert_offsets,
        routing.tile_expert,
        count,
        rows,
        hidden,
        intermediate,
        SPLIT=up_weight is not None,
        TOP_K=top_k,
        TMA=plan.tma,
        ALIGN=plan.align,
        **_gating(experts),
        **_cut(tiles),
    )
    return projected, act


def gate_grad(
    plan: GemmTiling,
    act_grad: Tensor,
    projected: Tensor,
    row_grad: Tensor,
    experts: Experts,
    top_k_weights: Tensor,
    routing: Routing,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of gate and up, [2, R, I] or, for transposed weights, [1, R, 2I]; weight * act [1, R, I]; and the
    gradient of `top_k_weights`."""
    _, rows, intermediate = act_grad.shape
    projected_grad = (
        projected.new_empty(1, rows, 2 * intermediate) if experts.transposed else torch.empty_like(projected)
    )
    weighted_act = torch.empty_like(act_grad)
    # Pairs with an expert of another rank have no row, so the kernel does not write their gradient.
    weights_grad = torch.zeros_like(top_k_weights)
    kernels.gate_grad_kernel[(rows // 8,)](
        act_grad,
        projected,
        row_grad,
        experts.down_bias,
        routing.row_to_pair,
        top_k_weights,
        projected_grad,
        weighted_act,
        weights_grad,
        routing.expert_offsets,
        routing.tile_expert,
        routing.expert_counts.numel(),
        rows,
        row_grad.shape[2],
        intermediate,
        ALIGN=plan.align,
        BM=8,
        BC=min(triton.next_power_of_2(intermediate), 256),
        num_warps=4,
        **_gating(experts),
    )
    return projected_grad, weighted_act, weights_grad


def bias_grad(grad: Tensor, routing: Routing, top_k_weights: Tensor | None = None) -> Tensor:
    """[E, C]: the sum of `grad` [1, R, C] over each expert's rows, times their routing weights if given."""
    columns, experts = grad.shape[2], routing.expert_counts.numel()
    out = grad.new_empty(experts, columns)
    kernels.bias_grad_kernel[(experts, triton.cdiv(columns, 64))](
        grad,
        routing.row_to_pair,
        top_k_weights,
        out,
        routing.expert_offsets,
        routing.expert_counts,
        columns,
        WEIGHTED=top_k_weights is not None,
        BM=64,
        BC=64,
        num_warps=4,
    )
    return out


def _forward(x: Tensor, experts: Experts, index: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
    return forward(plan_for(experts), x, experts, index, weights)


def _fake(x: Tensor, experts: Experts, index: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
    count, _, intermediate = experts.sizes
    routing = empty_routing(index, count, plan_for(experts, real=False).align)
    projected = x.new_empty(1 + experts.gated, routing.row_to_pair.numel(), intermediate)
    return torch.empty_like(x, memory_format=torch.contiguous_format), projected, *routing


def _backward(
    grad: Tensor, x: Tensor, experts: Experts, weights: Tensor, saved: Sequence[Tensor], wanted: Wanted
) -> Grads:
    projected, *routing = saved
    return backward(plan_for(experts), grad, x, experts, weights, projected, Routing(*routing), wanted)


_experts = differentiable("moe_fused_triton", _forward, _backward, _fake)
