"""load_balancing_loss: registration of the op and of its kernels."""

import torch

from opslot.ops.load_balancing_loss.op import OP
from opslot.slots import KERNEL_REGISTRY, HardwareRequirement, KernelSpec

KERNEL_REGISTRY.register_op(OP)

KERNEL_REGISTRY.register(
    KernelSpec(
        "triton",
        OP.name,
        "standard",
        "opslot.ops.load_balancing_loss.triton:standard",
        hardware=HardwareRequirement("gpu", min_compute_capability=80),
        requires=("triton",),
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
        priority={"gpu": 80},
        interpretable=True,
        description="one launch over all layers, deterministic",
    )
)
KERNEL_REGISTRY.register(
    KernelSpec(
        "stacked",
        OP.name,
        "standard",
        "opslot.ops.load_balancing_loss.stacked:standard",
        priority={"cpu": 60},
        description="plain torch, all layers in one pass",
    )
)
