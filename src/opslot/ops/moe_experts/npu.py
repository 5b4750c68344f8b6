"""fused_npu: grouped_mm on Ascend's grouped GEMMs."""

from __future__ import annotations

import torch
import torch_npu
from torch import Tensor

from opslot.ops._common.contract import variants_of
from opslot.ops._common.specs import HALF_FLOATS
from opslot.ops.moe_experts import contract
from opslot.ops.moe_experts._autograd import differentiable
from opslot.ops.moe_experts._call import prepare
from opslot.ops.moe_experts.contract import ExpertsInputs
from opslot.ops.moe_experts.grouped_mm import fake, forward_and_backward


def _run(given: ExpertsInputs) -> Tensor:
    """For bf16 and fp16 on an Ascend NPU."""
    x, experts = prepare("fused_npu", given, HALF_FLOATS)
    return _experts(x, experts, given.top_k_index, given.top_k_weights).to(given.hidden_states.dtype)


(standard,) = variants_of(_run, [contract.standard])


def _gemm(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """group_type 0 groups the rows of `left`, 2 the reduced dim; group_list_type 0 means ends of groups."""
    over_rows = right.dim() == 3
    return torch_npu.npu_grouped_matmul(
        [left],
        [right],
        group_list=ends.to(torch.int64),
        group_list_type=0,
        group_type=0 if over_rows else 2,
        split_item=2 if over_rows else 3,
    )[0]


_experts = differentiable("moe_fused_npu", *forward_and_backward(lambda x, experts: _gemm), fake, module=__name__)
