"""fused_npu: grouped_mm on Ascend's grouped products."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch_npu
from torch import Tensor

from opslot.ops.moe_experts._autograd import Grads, differentiable
from opslot.ops.moe_experts._call import prepare
from opslot.ops.moe_experts.grouped_mm import Outputs, backward_grouped, fake, forward_grouped

DTYPES = frozenset({torch.float16, torch.bfloat16})


def fused_npu(
    hidden_states: Tensor, gate_up_proj: Tensor, down_proj: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The contract of `op.standard` for bf16 and fp16 on an Ascend NPU."""
    tensors = (hidden_states, gate_up_proj, down_proj, top_k_index, top_k_weights)
    x, gate_up, down = prepare("fused_npu", *tensors, dtypes=DTYPES)
    return _experts(x, gate_up, down, top_k_index, top_k_weights).to(hidden_states.dtype)


def _product(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """group_type 0 splits the rows of `left`, 2 the summed dimension; group_list_type 0 takes the groups' ends."""
    over_rows = right.dim() == 3
    return torch_npu.npu_grouped_matmul(
        [left],
        [right],
        group_list=ends.to(torch.int64),
        group_list_type=0,
        group_type=0 if over_rows else 2,
        split_item=2 if over_rows else 3,
    )[0]


def _forward(x: Tensor, gate_up_proj: Tensor, down_proj: Tensor, index: Tensor, weights: Tensor) -> Outputs:
    return forward_grouped(_product, x, gate_up_proj, down_proj, index, weights)


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
    return backward_grouped(_product, *arguments)


_experts = differentiable("moe_fused_npu", _forward, _backward, fake)
