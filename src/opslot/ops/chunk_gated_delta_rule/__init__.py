"""chunk_gated_delta_rule: registration of the op and of its kernels."""

import torch

from opslot.ops.chunk_gated_delta_rule.op import OP
from opslot.slots import KERNEL_REGISTRY, HardwareRequirement, KernelSpec

KERNEL_REGISTRY.register_op(OP)
KERNEL_REGISTRY.register(
    KernelSpec(
        "fla",
        "chunk_gated_delta_rule",
        "standard",
        "opslot.ops.chunk_gated_delta_rule.fla:chunk_gated_delta_rule",
        HardwareRequirement("gpu", min_compute_capability=(8, 0)),
        requires=("fla", "triton"),
        dtypes=frozenset({torch.float16, torch.bfloat16}),
        # No priority: its proof on a GPU has not ended within the time there was, so `auto` leaves it alone.
        description="flash-linear-attention's chunked kernel, packed documents by cu_seqlens",
    )
)
