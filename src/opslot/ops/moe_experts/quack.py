"""fused_quack: routed experts on quack-kernels' grouped CuTe GEMMs (SM90 and newer, bf16 and fp16).

The GEMMs gather tokens as they load them; SwiGLU, its backward, the routing weights and their gradients are in the
GEMMs' epilogues. quack interleaves gate and up columns, so [P, 2I] interleaved columns are saved for backward.
`concat_layout` declares that the parameter and its gradient are concatenated. Sorting and combine are shared with
fused_triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from quack import gemm_interface
from quack.gemm_config import GemmConfig
from torch import Tensor

from opslot._base.errors import KernelError
from opslot.ops._common.contract import variants_of
from opslot.ops._common.specs import HALF_FLOATS
from opslot.ops.moe_experts import contract
from opslot.ops.moe_experts._autograd import Grads, Wanted, differentiable
from opslot.ops.moe_experts._call import prepare
from opslot.ops.moe_experts.contract import Experts, ExpertsInputs
from opslot.ops.moe_experts.routing import Routing, empty_routing, route
from opslot.ops.moe_experts.triton import combine, pair_sum


def _cut(tile_m: int, tile_n: int, pingpong: bool) -> GemmConfig:
    # Dynamic: a CTA that waits for an SM occupied by a collective must not delay its fixed share of tiles. On four
    # H200s with FSDP a step took 4.5% less time (on different machines); not measured without collectives.
    return GemmConfig(
        tile_m=tile_m, tile_n=tile_n, cluster_m=2, cluster_n=1, pingpong=pingpong, is_dynamic_persistent=True
    )


# quack's autotuning compiles dozens of kernels per GEMM. On an H200 this one was within 2% of the fastest for every
# GEMM at the sizes of Qwen3-30B-A3B and DeepSeek-V3 (benchmarks/tune_moe.py).
CUTS = dict.fromkeys(
    ("gate_up", "down", "act_grad", "input_grad", "gate_up_grad", "down_grad"), _cut(128, 256, pingpong=False)
)


# quack-kernels 0.6.2 replaced `gemm_gated_tuned` and `gemm_dgated_tuned`; their `fn` is the kernel without its tuner.


def _gemm_gated(a: Tensor, b: Tensor, projected: Tensor, act: Tensor, **options: Any) -> None:
    if hasattr(gemm_interface, "gemm_gated_tuned"):
        gemm_interface.gemm_gated_tuned.fn(a, b, projected, act, activation="swiglu", **options)
    else:
        gemm_interface.gemm_act(a, b, activation="swiglu", preact_out=projected, postact_out=act, **options)


def _gemm_dgated(
    a: Tensor, b: Tensor, projected: Tensor, projected_grad: Tensor, act: Tensor, **options: Any
) -> Tensor:
    options |= {"activation": "swiglu", "colvec_reduce": True}
    if hasattr(gemm_interface, "gemm_dgated_tuned"):
        return gemm_interface.gemm_dgated_tuned.fn(a, b, projected, projected_grad, act, **options)
    return gemm_interface.gemm_dact(a, b, projected, dx_out=projected_grad, postact_out=act, **options)[-1]


def _gemm(a: Tensor, b: Tensor, out: Tensor, **options: Any) -> None:
    gemm_interface.gemm_tuned.fn(a, b, out, **options)


def _run(given: ExpertsInputs) -> Tensor:
    """For bf16 and fp16, SiLU, and H and I multiples of 8. Deterministic.

    Raises:
        KernelError: another activation, unsupported shapes or dtypes, or weights that are not contiguous.
    """
    x, experts = prepare("fused_quack", given, HALF_FLOATS, contiguous=True, multiple=8)
    if experts.activation != "silu":
        raise KernelError(
            "moe_implementation='fused_quack' cannot run this call",
            found=f"the activation {experts.activation!r}, not SiLU",
            hint="use moe_implementation=fused_triton or grouped_mm",
        )
    return _experts(x, experts, given.top_k_index, given.top_k_weights).to(given.hidden_states.dtype)


(standard,) = variants_of(_run, [contract.standard])


def _forward(x: Tensor, experts: Experts, index: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
    gate_up_proj, down_proj = experts.gate_up_proj, experts.down_proj
    count, hidden, intermediate = experts.sizes
    x, top_k = x.contiguous(), index.shape[1]
    routing = route(index.contiguous(), count, align=1)
    rows = routing.row_to_pair.numel()
    projected = x.new_empty(rows, 2 * intermediate)
    if rows == 0:
        return torch.zeros_like(x), projected, *routing
    act = x.new_empty(rows, intermediate)
    _gemm_gated(
        x,
        gate_up_proj.mT,
        projected,
        act,
        cu_seqlens_m=routing.expert_offsets,
        A_idx=_tokens(routing, top_k),
        config=CUTS["gate_up"],
        concat_layout=("B",),
    )
    outputs = x.new_empty(rows, hidden)
    _gemm(act, down_proj.mT, outputs, cu_seqlens_m=routing.expert_offsets, config=CUTS["down"])
    return combine(outputs, routing.pair_to_row, weights.contiguous(), True), projected, *routing


def _fake(x: Tensor, experts: Experts, index: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
    count, _, intermediate = experts.sizes
    routing = empty_routing(index, count, align=1)
    projected = x.new_empty(index.numel(), 2 * intermediate)
    return torch.empty_like(x, memory_format=torch.contiguous_format), projected, *routing


def _backward(
    grad: Tensor, x: Tensor, experts: Experts, weights: Tensor, saved: Sequence[Tensor], wanted: Wanted
) -> Grads:
    gate_up_proj, down_proj = experts.gate_up_proj, experts.down_proj
    projected, routing = saved[0], Routing(*saved[1:])
    rows, hidden = routing.row_to_pair.numel(), x.shape[1]
    if rows == 0:
        return Grads(*(torch.zeros_like(t) for t in (x, gate_up_proj, down_proj, weights)))
    x, grad, weights = x.contiguous(), grad.contiguous(), weights.contiguous()
    tokens = _tokens(routing, weights.shape[1])
    scale = weights.view(-1)[routing.row_to_pair.clamp(min=0)].float()
    projected_grad = torch.empty_like(projected)
    weighted_act = x.new_empty(rows, down_proj.shape[2])
    dots = _gemm_dgated(
        grad,
        down_proj,
        projected,
        projected_grad,
        weighted_act,
        colvec_scale=scale,
        cu_seqlens_m=routing.expert_offsets,
        A_idx=tokens,
        config=CUTS["act_grad"],
    )
    weights_grad = pair_sum(dots.view(1, rows), routing.pair_to_row, weights)
    x_grad = gate_up_grad = down_grad = None
    if wanted.weights:
        down_grad, gate_up_grad = torch.empty_like(down_proj), torch.empty_like(gate_up_proj)
        by_expert = {"cu_seqlens_k": routing.expert_offsets, "A_idx": tokens}
        _gemm(grad.mT, weighted_act, down_grad, config=CUTS["down_grad"], **by_expert)
        _gemm(x.mT, projected_grad, gate_up_grad.mT, config=CUTS["gate_up_grad"], concat_layout=("out",), **by_expert)
    if wanted.inputs:
        terms = x.new_empty(rows, hidden)
        _gemm(
            projected_grad,
            gate_up_proj,
            terms,
            cu_seqlens_m=routing.expert_offsets,
            config=CUTS["input_grad"],
            concat_layout=("B",),
        )
        x_grad = combine(terms, routing.pair_to_row, weights, False)
    return Grads(x_grad, gate_up_grad, down_grad, weights_grad)


def _tokens(routing: Routing, top_k: int) -> Tensor:
    return routing.row_to_pair.clamp(min=0) // top_k


_experts = differentiable("moe_fused_quack", _forward, _backward, _fake)
