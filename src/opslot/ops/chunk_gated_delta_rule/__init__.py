"""chunk_gated_delta_rule: registration of the op and of its kernels."""

import torch

from opslot.ops.chunk_gated_delta_rule.op import OP
from opslot.slots import KERNEL_REGISTRY, HardwareRequirement, KernelSpec

_HERE = "opslot.ops.chunk_gated_delta_rule"

KERNEL_REGISTRY.register_op(OP)
KERNEL_REGISTRY.register(
    KernelSpec(
        "fla",
        OP.name,
        "standard",
        f"{_HERE}.fla:chunk_gated_delta_rule",
        HardwareRequirement("gpu", min_compute_capability=(8, 0)),
        requires=("fla", "triton"),
        dtypes=frozenset({torch.float16, torch.bfloat16}),
        description="flash-linear-attention's chunked kernel, packed documents by cu_seqlens",
    )
)
KERNEL_REGISTRY.register(
    KernelSpec(
        "torch_chunked",
        OP.name,
        "standard",
        f"{_HERE}.op:reference",
        # As fast as upstream's own chunks within 10 % on a CPU, and right for packed documents, which upstream mixes.
        priority={"cpu": 10},
        description="torch alone, chunk by chunk, packed documents by cu_seqlens, any device",
    )
)
