"""cross_entropy_loss: registration of the op and of its kernels."""

import torch

from opslot.ops.cross_entropy_loss.op import OP
from opslot.slots import KERNEL_REGISTRY, HardwareRequirement, KernelSpec

_HALF_AND_SINGLE = frozenset({torch.float32, torch.bfloat16, torch.float16})

KERNEL_REGISTRY.register_op(OP)

for _variant in OP.variants:
    KERNEL_REGISTRY.register(
        KernelSpec(
            "chunk_loss",
            OP.name,
            _variant,
            f"opslot.ops.cross_entropy_loss.chunk_loss:{_variant}",
            priority={"gpu": 40, "cpu": 60},
            description="plain torch, chunk by chunk, never the full logits",
        )
    )
